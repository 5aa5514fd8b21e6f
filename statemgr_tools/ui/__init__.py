"""The web page of ``statemgr ui``: plain HTML without scripts, made on the server. Reads only."""
