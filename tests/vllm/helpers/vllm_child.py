"""One real vLLM engine in a process of its own: commands come as JSON lines on stdin, answers go to fd `argv[1]`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(answers: int, options: dict[str, Any]) -> None:
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    from kvtier.testing.tiny_model import tiny_prompt

    out = os.fdopen(answers, "w", buffering=1)
    try:
        llm = LLM(
            skip_tokenizer_init=True,
            dtype="float32",
            load_format="auto",
            enforce_eager=True,
            disable_log_stats=False,
            **options,
        )
    except Exception as error:
        print(json.dumps({"failed": repr(error)}), file=out)
        raise
    print(json.dumps({"ready": os.getpid()}), file=out)

    def sampling(max_tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=20, detokenize=False)

    def told(output: Any) -> dict[str, Any]:
        made = output.outputs[0]
        first = {str(token): found.logprob for token, found in made.logprobs[0].items()} if made.logprobs else {}
        return {"cached": output.num_cached_tokens, "tokens": list(made.token_ids), "first": first}

    def prompts(given: list[list[int]]) -> list[Any]:
        return [{"prompt_token_ids": tiny_prompt(seed, tokens) + more} for seed, tokens, *more in given]

    def generate(command: dict[str, Any]) -> Any:
        outputs = llm.generate(prompts(command["prompts"]), sampling(command["max_tokens"]), use_tqdm=False)
        return [told(output) for output in outputs]

    def abort(command: dict[str, Any]) -> Any:
        """Start the prompts, give the engine some steps, abort them all, and run until the engine is idle."""
        engine = llm.llm_engine
        ids = [
            engine.add_request(f"abort-{command['name']}-{i}", prompt, sampling(command["max_tokens"]))
            for i, prompt in enumerate(prompts(command["prompts"]))
        ]
        for _ in range(command["steps"]):
            engine.step()
        engine.abort_request([str(id_) for id_ in ids], internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return ids

    def metrics(command: dict[str, Any]) -> Any:
        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith(("kvtier_", "vllm:num_preemptions")):
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def reset(command: dict[str, Any]) -> Any:
        return llm.reset_prefix_cache(reset_connector=command["connector"])

    do = {"generate": generate, "abort": abort, "metrics": metrics, "reset": reset}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            break
        print(json.dumps({"answer": do[command["do"]](command)}), file=out)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
