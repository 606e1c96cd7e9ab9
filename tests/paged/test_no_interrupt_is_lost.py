"""Ctrl-C in code whose exceptions Python drops: finalizers and callbacks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The program of a library user, which has an engine and handles no signals.
SCRIPT = """
import gc, os, signal, sys, time, weakref
from paged.engine import Engine, EngineConfig
from tests.paged.hashing_executor import HashingExecutor
from tests.paged.tiny import TINY
# As at a terminal: shells start background programs with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
config = EngineConfig(max_model_len=64)
engine = Engine(TINY, config, HashingExecutor(config))

class Thing:
    pass

class Finalized:
    def __del__(self):
        press()

def generator():
    try:
        yield
    finally:
        press()

def press(phase=None, _=None):
    if phase != "stop":
        os.kill(os.getpid(), signal.SIGINT)

def weak_reference():
    thing = Thing()
    reference = weakref.ref(thing, press)
    del thing

def finalizer():
    Finalized()

def dropped_generator():
    next(generator())

def collector():
    gc.callbacks.append(press)
    gc.collect(0)
    gc.callbacks.remove(press)

for land in (weak_reference, finalizer, dropped_generator, collector):
    try:
        land()
        time.sleep(10)
        print("lost in", land.__name__)
    except KeyboardInterrupt:
        print("kept in", land.__name__)
"""


# On a busy machine, the main thread waits for a processor after it has started another thread.
BUSY = """
import threading, time
start = threading.Thread.start
threading.Thread.start = lambda self: (start(self), time.sleep(0.1))
"""


@pytest.mark.parametrize(
    "machine", [pytest.param("", marks=pytest.mark.slow), BUSY], ids=["idle", "busy"]
)
def test_an_interrupt_in_what_nobody_called_comes_again(machine):
    program = [sys.executable, "-c", machine + SCRIPT]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    places = ("weak_reference", "finalizer", "dropped_generator", "collector")
    assert done.stdout.splitlines() == [f"kept in {place}" for place in places], done.stderr
