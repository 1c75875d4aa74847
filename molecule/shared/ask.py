"""One HTTPS request for the scenarios: ``ask.py HOST SITE TIMEOUT_SECS`` prints the seconds that its answer took.

Exit code 1, with the reason, where the answer is not 200. The certificate is not verified: it is self-signed.
"""

from __future__ import annotations

import http.client
import ssl
import sys
import time


def main() -> None:
    """The program."""
    host, site, timeout_secs = sys.argv[1:]
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    began = time.monotonic()
    connection = http.client.HTTPSConnection(host, timeout=float(timeout_secs), context=context)
    try:
        connection.request("GET", "/", headers={"Host": site, "Connection": "close"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"{type(error).__name__}: {error} after {time.monotonic() - began:.2f} s")
    if response.status != http.client.OK:
        sys.exit(f"status {response.status} after {time.monotonic() - began:.2f} s")
    print(f"{time.monotonic() - began:.3f}")


if __name__ == "__main__":
    main()
