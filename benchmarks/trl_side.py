"""TRL's side of `python -m benchmarks.beside_trl`: its GRPOTrainer, unmodified, and a step of plain transformers.

    .cache/trl/bin/python -m benchmarks.trl_side JOB.json

`benchmarks.beside_trl` starts this file with that interpreter. It imports nothing of headrace. Generation is timed
around `model.generate`, which also shows the ids of the prompts; everything else of a step counts as training. The last
line is JSON.
"""

import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def now() -> tuple[float, float]:
    """Wall and processor time in seconds."""
    return time.perf_counter(), time.process_time()


def tiny(job: dict[str, Any]) -> None:
    """Save a tiny model with the tokenizer of a checkpoint, for `--smoke`."""
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["from"])
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, dtype=job["dtype"],
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch = importlib.import_module("torch")
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, job["dtype"]))
    model.save_pretrained(job["model"])
    tokenizer.save_pretrained(job["model"])


def plain(job: dict[str, Any], model: Any, sequences: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """A step of plain transformers on these prompts and completions: forward, backward and AdamW. The best of two."""
    torch = importlib.import_module("torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"])
    best: dict[str, float] = {}
    for _ in range(2):
        wall, cpu = now()
        for at in range(0, len(sequences), job["group_size"]):
            rows = sequences[at : at + job["group_size"]]
            longest = max(len(prompt) + len(completion) for prompt, completion in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.long)
            mask, learned = torch.zeros_like(ids), torch.zeros(len(rows), longest)
            for row, (prompt, completion) in enumerate(rows):
                both = prompt + completion
                ids[row, : len(both)] = torch.tensor(both)
                mask[row, : len(both)] = 1
                learned[row, len(prompt) : len(both)] = 1.0
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(logprobs * learned[:, 1:]).sum() / (len(sequences) * job["tokens"])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ended = now()
        spent = {"wall_s": ended[0] - wall, "cpu_s": ended[1] - cpu}
        best = min(best or spent, spent, key=lambda each: each["cpu_s"])
    trained = sum(len(prompt) + len(completion) for prompt, completion in sequences)
    return {**best, "tokens": float(trained)}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and tell what every step took."""
    torch, trl, datasets, transformers = map(importlib.import_module, ("torch", "trl", "datasets", "transformers"))
    groups, size = job["groups"], job["group_size"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    tokenizer.padding_side = "left"
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    steps: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    last: list[tuple[list[int], list[int]]] = []
    spent = {"wall": 0.0, "cpu": 0.0, "tokens": 0, "reward": 0.0}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = [sum(id % 2 for id in ids) / max(1, len(ids)) for ids in completion_ids]
        spent["tokens"] += sum(map(len, completion_ids))
        spent["reward"] = sum(rewards) / len(rewards)
        last[:] = zip(prompts[-len(completion_ids) :], completion_ids, strict=True)
        return rewards

    began = now()

    def begin(*_: Any, **__: Any) -> None:
        nonlocal began
        began = now()
        spent.update(wall=0.0, cpu=0.0, tokens=0)

    def end(*_: Any, **__: Any) -> None:
        wall, cpu = now()
        step = {"wall_s": wall - began[0], "cpu_s": cpu - began[1], "generation_s": spent["wall"]}
        step |= {"generation_cpu_s": spent["cpu"], "tokens": spent["tokens"], "reward": spent["reward"]}
        steps.append(step)
        print(json.dumps(step), file=sys.stderr, flush=True)

    stamps = transformers.TrainerCallback()
    stamps.on_step_begin, stamps.on_step_end = begin, end
    config = trl.GRPOConfig(
        output_dir=job["folder"], use_cpu=True, bf16=job["dtype"] == "bfloat16", seed=1, report_to="none",
        save_strategy="no", shuffle_dataset=False, max_steps=job["steps"], per_device_train_batch_size=size,
        gradient_accumulation_steps=groups, num_generations=size, max_completion_length=job["tokens"], temperature=1.0,
        learning_rate=job["learning_rate"], lr_scheduler_type="constant", adam_beta2=0.95, beta=0.0,
        loss_type="dr_grpo", scale_rewards="none", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model, args=config, reward_funcs=reward, processing_class=tokenizer, callbacks=[stamps],
        train_dataset=datasets.Dataset.from_list([{"prompt": tokenizer.decode(ids)} for ids in job["prompts"]]),
    )  # fmt: skip
    generate = model.generate

    def timed(*args: Any, **named: Any) -> Any:
        ids, mask = named["input_ids"], named["attention_mask"]
        prompts.extend(row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True))
        wall, cpu = now()
        out = generate(*args, **named)
        ended = now()
        spent["wall"] += ended[0] - wall
        spent["cpu"] += ended[1] - cpu
        return out

    model.generate = timed
    trainer.train()
    model.generate = generate
    return {
        "steps": steps,
        "prompts": prompts,
        "plain": plain(job, model, last),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {module.__name__: module.__version__ for module in (torch, trl, transformers)},
    }


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    if "from" in asked:
        tiny(asked)
    else:
        print(json.dumps(train(asked)))
