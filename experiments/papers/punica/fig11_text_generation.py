"""Text generation on one GPU for many LoRA tenants (Punica Fig. 11), in simulated time.

    python -m experiments.papers.punica.fig11_text_generation

`text_generation` describes the systems and the workload. A step takes the cost model's time,
including the bytes and launches of its adapters, and the host time of §5.2. The host's share of the
time, and Punica's rate without host time, are reported beside the rates.
"""

from experiments.papers.punica import text_generation

SYSTEMS = ("punica", "vllm", "fastertransformer")

STUDY = text_generation.study(
    __file__,
    SYSTEMS,
    {"7b": (1044.0, 1044.0), "13b": (693.0, 693.0)},
    title="Text generation on one GPU for many LoRA tenants (Punica Fig. 11)",
    claim="Punica generates 1,044 (7B) and 693 (13B) tokens/s whatever the popularity, 12 times as "
    "many as systems that batch one adapter at a time",
    here="Llama-2 7B and 13B, an A100-80",
    differs="DeepSpeed and Hugging Face are left out; vLLM has Punica's host time",
    paper={"7b_vllm_identical": 1140.0, "13b_vllm_identical": 789.0},
    minutes=(1, 12),
    size=(11, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
