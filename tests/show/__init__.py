"""The appliance under a mixed load while it is reloaded, upgraded and loses workers: `python -m tests.show`."""
