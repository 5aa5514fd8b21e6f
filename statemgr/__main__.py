"""``python -m statemgr`` runs the command line."""

from statemgr.cli.main import main

main()
