"""Checks of the network: the loopback interface, which ranks need, and the hub, which only downloads need."""

import os
import socket
import sys
import time

from tokenscale.base.errors import without_password
from tokenscale.cli import doctor_machine as machine
from tokenscale.cli.doctor_finding import Asked, Finding


def loopback(asked: Asked) -> Finding:
    """Ports on the loopback interface, where the ranks of one machine meet."""
    errors = {}
    for name, family, address in (("IPv4", socket.AF_INET, "127.0.0.1"), ("IPv6", socket.AF_INET6, "::1")):
        try:
            machine.talk(family, address)
        except OSError as error:
            errors[name] = error.strerror or str(error)
    values = {"ipv4": "IPv4" not in errors, "ipv6": "IPv6" not in errors}
    if "IPv4" in errors:
        only = "; IPv6 works, but ranks meet at 127.0.0.1" if values["ipv6"] else ""
        cure = "ip link set lo up && ip address add 127.0.0.1/8 dev lo, or let the firewall pass it"
        return Finding("no", f"no port at 127.0.0.1: {errors['IPv4']}{only}", cure, values)
    interfaces = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else ["lo"]
    if "lo" not in interfaces:
        cure = f"set GLOO_SOCKET_IFNAME to one of {', '.join(interfaces)}"
        return Finding("note", "a port at 127.0.0.1 works, but no interface is named lo", cure, values)
    ipv6 = "works too" if values["ipv6"] else "does not, and is not needed"
    return Finding("ok", f"a free port at 127.0.0.1 takes a connection; IPv6 {ipv6}", values=values)


def hub(asked: Asked) -> Finding:
    """The hub of tokenizers and texts, and only when asked: after the install nothing of the demo needs a network."""
    if not asked.network:
        return Finding("ok", "not tried (--network tries the hub); after the install the demo needs none")
    import urllib.error
    import urllib.request

    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not address.lower().startswith(("http://", "https://")):
        return Finding("no", f"HF_ENDPOINT is no web address: {address}", "unset HF_ENDPOINT", {"reached": False})
    start = time.monotonic()
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except Exception as error:
        fact = without_password(f"{address} cannot be reached: {getattr(error, 'reason', None) or error}")
        cure = "needed only for tokenizers and texts by a name on the hub: fetch them elsewhere, name their folder"
        return Finding("no", fact, cure, {"reached": False})
    fact = f"{without_password(address)} answers in {time.monotonic() - start:.1f} s"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return Finding("note", f"{fact}; HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to use it", {"reached": True})
    return Finding("ok", fact, values={"reached": True})
