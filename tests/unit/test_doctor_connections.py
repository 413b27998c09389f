"""What `doctor` says of the loopback interface and of the hub."""

import errno
import http.server
import threading

import pytest

from tests.machines import asked
from tokenscale.cli import doctor_checks
from tokenscale.cli import doctor_machine as machine


@pytest.mark.parametrize("blocked, verdict", [((), "ok"), (("::1",), "ok"), (("127.0.0.1",), "no")])
def test_ranks_need_a_port_at_127_0_0_1(monkeypatch, blocked, verdict):
    def talk(family, address):
        if address in blocked:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(machine, "check_port", talk)
    found = doctor_checks.check_loopback(asked())
    assert found.verdict == verdict
    if verdict == "no":
        assert "IPv6 works, but ranks rendezvous at 127.0.0.1" in found.fact and found.next


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.asked.append(self.path)
        self.send_response(403)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/hub")
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server
        server.shutdown()


def test_the_network_is_touched_only_when_asked(hub, monkeypatch):
    assert doctor_checks.check_hub(asked()).fact.startswith("not tried") and hub.asked == []
    assert doctor_checks.check_hub(asked(network=True)).verdict == "ok" and hub.asked == ["/hub"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor_checks.check_hub(asked(network=True)).verdict == "note"


def test_a_hub_that_does_not_answer_is_no(hub, monkeypatch):
    hub.shutdown()
    hub.server_close()
    found = doctor_checks.check_hub(asked(network=True))
    assert found.verdict == "no" and "refused" in found.fact
