"""The inputs of steps that are driven without an engine."""

import numpy as np

from paged.config import EngineConfig
from paged.kv_cache.policy import ShardedModel
from paged.policy_driver import HostDriver, decode_inputs
from tests.paged.tiny import TINY

CONFIG = EngineConfig(
    max_num_seqs=3, max_num_batched_tokens=16, max_prefills_per_step=2, max_model_len=64,
    page_size=16, kv_cache_tokens=256,
)  # fmt: skip


def test_a_decode_of_every_sequence():
    inputs = decode_inputs(CONFIG, ShardedModel.split(TINY), [1, 16, 33])
    assert inputs.num_prefill_tokens == 0 and inputs.positions.tolist() == [0, 15, 32]
    assert np.all(inputs.samples == 1) and inputs.token_rows.tolist() == [0, 1, 2]
    assert inputs.tables.tolist() == [[1, 0, 0, 0], [2, 0, 0, 0], [5, 4, 3, 0]]


def test_prompts_beside_a_decode():
    driver = HostDriver(CONFIG, ShardedModel.split(TINY), [20, 20, 5], [40] * 3)
    driver.prefill(0, 20)
    inputs = driver.inputs([(0, 1), (1, 11), (2, 5)], Tp=18, Sd=3)
    assert inputs.query_starts.tolist() == [0, 11, 16]
    assert inputs.slots.tolist() == [1, 2, 0, 3, 3]
    assert inputs.lengths.tolist() == [11, 5, 21, 0, 0]
    assert inputs.last_tokens[:3].tolist() == [10, 15, 18]
    assert inputs.token_rows.tolist() == [0] * 11 + [1] * 5 + [5] * 2 + [2] + [5] * 2
    assert inputs.positions[[0, 10, 11, 15, 18]].tolist() == [0, 10, 0, 4, 20]
    assert driver.computed.tolist() == [21, 11, 5] and (inputs.tables[3:] == 0).all()
