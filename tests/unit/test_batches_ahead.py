"""Reading ahead changes nothing but when batches are read, and leaves no thread behind."""

import functools
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.corpora import make_run, same
from tokenscale.data.batches.batch import Prefetcher
from tokenscale.settings.run import APPROACHES

T = 16


@pytest.fixture(autouse=True)
def no_thread_left_over():
    def late(*_):
        raise TimeoutError("a method did not return")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert not readers()


def readers():
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("tokenscale-prefetch")
    ]


class Source:
    """Batches of an approach that count how often they were asked; can fail, and can be held up."""

    def __init__(self, batches):
        self._batches = batches
        self.vocabulary_size = batches.vocabulary_size
        self.lost = batches.lost
        self.state = batches.state
        self.seek = batches.seek
        self.asked = 0
        self.fails_at = None
        self.gate = threading.Event()
        self.gate.set()

    def next(self):
        self.asked += 1
        self.gate.wait(10)
        if self.state()["step"] == self.fails_at:
            raise OSError("the disk is gone")
        return self._batches.next()


def settled(source):
    seen = -1
    while seen != source.asked:
        seen = source.asked
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("approach", APPROACHES)
def test_batches_and_states_are_those_of_the_source(lab, approach):
    run = make_run(approach, sequence_length=T, global_batch=3)
    source = lab.batches(run)
    ahead = Prefetcher(lab.batches(run))
    assert ahead.vocabulary_size == source.vocabulary_size
    kept = []
    for _ in range(70):  # over the end of a block of the order
        assert ahead.state() == source.state()
        kept.append((ahead.next(), source.next().copy()))
    assert ahead.state() == source.state()
    assert all(same(a, b) for a, b in kept)  # at the end: nobody wrote into what was handed out
    ahead.close()


@pytest.mark.parametrize("approach", APPROACHES)
def test_a_seek_discards_what_was_read_ahead(lab, approach):
    run = make_run(approach, sequence_length=T, global_batch=3)
    source = lab.batches(run)
    ahead = Prefetcher(lab.batches(run))
    for step in (9, 2, 40):
        states = []
        for at in (source, ahead):
            at.seek({"step": step})
            at.next()
            states.append(at.state())
        assert states[0] == states[1] and all(same(ahead.next(), source.next()) for _ in range(3))
        for at in (source, ahead):
            at.seek(states[0])
        assert ahead.state() == source.state() == states[0]
        assert same(ahead.next(), source.next()) and ahead.state() == source.state()
    ahead.close()


def test_one_batch_lies_ready_and_no_more(lab):
    source = Source(lab.batches(make_run("packed", sequence_length=T)))
    ahead = Prefetcher(source)
    assert settled(source) == 0 and not readers()
    for taken in range(1, 4):
        ahead.next()
        assert settled(source) == taken + 1
        assert len(readers()) == 1
    ahead.close()


def test_an_error_comes_in_its_turn_and_the_state_stays(lab):
    run = make_run("token-list", sequence_length=T)
    source = Source(lab.batches(run))
    plain = lab.batches(run)
    source.fails_at = 3
    ahead = Prefetcher(source)
    for _ in range(3):
        assert same(ahead.next(), plain.next())
    assert settled(source) == 4  # not asked again before its error came out
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.next()
        assert not readers() and ahead.state() == plain.state()
    source.fails_at = None
    assert same(ahead.next(), plain.next())
    ahead.close()


def test_closing_waits_neither_for_a_place_nor_for_more_than_the_batch_in_hand_and_loses_nothing(
    lab,
):
    run = make_run("padding-free", sequence_length=T)
    source = Source(lab.batches(run))
    plain = lab.batches(run)
    ahead = Prefetcher(source)
    for _ in range(3):
        assert same(ahead.next(), plain.next())
        settled(source)  # the thread waits for a place
        ahead.close()
        ahead.close()
        assert not readers() and ahead.state() == plain.state()
    ahead.next()
    settled(source)
    source.gate.clear()
    ahead.next()  # was ready; the thread is now held up in the source
    asked = settled(source)
    threading.Timer(0.2, source.gate.set).start()
    ahead.close()
    assert not readers() and source.asked == asked


SCRIPT = """
import codecs, pickle, sys
codecs.kept = opened = [open_again() for open_again in pickle.loads(sys.stdin.buffer.read())]
for batches in opened:
    batches.next()
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise ValueError('of the script')", 1)])
def test_batches_that_are_open_when_a_script_ends_print_nothing(lab, ending, code):
    """Also where a module that is cleared after this package's modules still holds them."""
    approaches = ("packed", "pretokenized-padded", "token-list", "length-bucketed")
    open_again = [functools.partial(lab.batches, make_run(approach, T)) for approach in approaches]
    command = [sys.executable, "-c", SCRIPT + ending]
    ended = subprocess.run(
        command, input=pickle.dumps(open_again), capture_output=True, check=False
    )
    said = ended.stderr.decode()
    assert ended.returncode == code and "Exception ignored" not in said and (code or not said), said
