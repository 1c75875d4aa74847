"""Certificates and TLS contexts: made once in the master, looked up by server name in a handshake."""
