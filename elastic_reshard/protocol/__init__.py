"""What members, watchdogs and the supervisor say to each other, and the deadlines they keep."""
