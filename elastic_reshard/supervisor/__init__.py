"""The supervisor: a pure state machine (`core`), its HTTP shell (`app`) and its journal. No torch here."""
