"""The agent's own version; agents of different versions understand each other's answers."""

VERSION = "1"
