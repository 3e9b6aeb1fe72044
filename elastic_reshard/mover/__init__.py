"""A mover's life: take a slice of a plan, form a communicator, run it, report. It may be killed at any moment without loss."""
