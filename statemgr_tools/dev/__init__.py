"""Real servers for development and tests on this machine, without Docker: a Kafka broker and an S3 server.

Starts and stops processes. Writes in the caller's directory and the user's cache directory.
"""

from __future__ import annotations

from statemgr.terminal.find_java import Java, find_java
from statemgr_tools.dev.jars import connector_jars, s3a_jars
from statemgr_tools.dev.servers import DevServers, down, status, up

__all__ = ["DevServers", "Java", "connector_jars", "down", "find_java", "s3a_jars", "status", "up"]
