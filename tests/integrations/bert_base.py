"""Take three steps of one method on BERT-base and print their cost as one line of JSON.

    python -m tests.integrations.bert_base kfac

It runs as a separate process, so that the peak memory is that of this method alone.
"""

import json
import math
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from secondorder import KFAC, HyLo, SparseMFAC
from tests.integrations import bert_sizes
from tests.integrations.bert_models import step
from tests.support.building import built
from tests.support.tasks import covered_layers

EXAMPLES, TOKENS, LABELS, STEPS, WINDOW = 2, 128, 2, 3, 1024

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (KFAC, {"lr": 2e-5, "graft": "adam", "factor_update_steps": 1, "inv_update_steps": 100}),
    "hylo": (HyLo, {"lr": 2e-5, "graft": "adam"}),
    "sparse_mfac": (SparseMFAC, {"lr": 1e-2, "damping": 0.1, "window_size": WINDOW}),
}


def random_batch(method: str, vocabulary: int) -> dict[str, Tensor]:
    words = torch.randint(5, vocabulary, (EXAMPLES, TOKENS))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.arange(EXAMPLES) % LABELS}
    # HyLo gets the rows of an example only from a table that is looked up for every example
    return batch | ({"position_ids": torch.arange(TOKENS).expand(EXAMPLES, -1)} if method == "hylo" else {})


def touch(optimizer: torch.optim.Optimizer) -> None:
    """Write to every page of the state, because zeros that were never written take no memory and are not counted."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.add_(0)


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    method = sys.argv[1]
    torch.manual_seed(0)
    config = BertConfig(num_labels=LABELS)
    model = BertForSequenceClassification(config)
    cls, keywords = METHODS[method]
    found: dict[str, Any] = {"method": method, "before": peak()}
    optimizer = built(cls, model, **keywords)
    touch(optimizer)
    found |= {"built": peak(), "losses": [], "cpu_seconds": []}
    batch = random_batch(method, config.vocab_size)
    for _ in range(STEPS):
        start = time.process_time()
        found["losses"].append(step(model, optimizer, batch, masked=False))
        found["cpu_seconds"].append(round(time.process_time() - start, 1))
    found["fallback"] = [row.split()[0] for row in optimizer.describe().splitlines() if "fallback:" in row]
    found["finite"] = all(math.isfinite(float(p.detach().sum())) for p in model.parameters())
    found["parameters"] = sum(p.numel() for p in model.parameters())
    found["held"] = optimizer.memory_usage()
    found["blocks"] = len(covered_layers(model))
    sizes = {"examples": EXAMPLES, "length": TOKENS, "window": WINDOW, "moments": 0 if method == "sparse_mfac" else 2}
    expected = bert_sizes.expected(method, model, **sizes)
    found["differences"] = bert_sizes.differences(found["held"], expected, found["blocks"])
    found["peak"] = peak()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
