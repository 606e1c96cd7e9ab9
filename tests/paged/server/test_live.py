"""The live page, and what it asks for: the engine between two steps, under each policy."""

import re
import threading
import urllib.request
from dataclasses import replace

import httpx2 as httpx
import pytest

from paged.server.owner import EngineOwner
from paged.server.view import CACHED, FREE, SHARED, view
from tests.paged.server.serving import CONFIG, KEY, served, simulated

POLICIES = ("vllm", "orca_max", "lserve", "diffkv")
