"""`python -m elastic_reshard`: the command line."""

from elastic_reshard.cli import main

main()
