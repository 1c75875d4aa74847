"""The proxy beside nginx, HAProxy and Caddy on the same work: CPU time, latency and memory."""
