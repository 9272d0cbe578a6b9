"""The real SGLang 0.5.23 HTTP server on a CPU, float32, with EAGLE-3; runs in SGLang's own venv.

python server.py --target T --draft D --tree 3,4,8 --port P --switch FILE
"""

import argparse
import functools
import os
import sys
from pathlib import Path

SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",  # its Triton kernels without a GPU
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "DUMPER_SERVER_PORT": "reuse",  # hooks are there, and write only when the switch says where
    "DUMPER_NON_INTRUSIVE_MODE": "all",
}


def run_scheduler(switch: Path, *args, **kwargs):
    """SGLang's scheduler process, its functions wrapped first."""
    import faults
    from sglang.srt.managers.scheduler import run_scheduler_process

    faults.install(switch)
    run_scheduler_process(*args, **kwargs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tree", required=True, help="num_steps,topk,num_draft_tokens")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--switch", type=Path, required=True)
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--no-hidden-states", action="store_true")
    args = parser.parse_args()
    num_steps, topk, num_draft_tokens = map(int, args.tree.split(","))

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    with override_platform(has_amx=True):  # else it turns to an attention EAGLE does not take
        server = ServerArgs(
            model_path=args.target,
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="intel_amx",
            max_total_tokens=4096,
            max_running_requests=4,
            context_length=512,
            disable_cuda_graph=True,
            disable_radix_cache=not args.prefix_cache,
            enable_return_hidden_states=not args.no_hidden_states,
            random_seed=0,
            sleep_on_idle=True,  # else its loop takes a whole core while it waits
            log_level="warning",
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=args.draft,
            speculative_num_steps=num_steps,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=num_draft_tokens,
            host="127.0.0.1",
            port=args.port,
            skip_server_warmup=True,
        )
        launch_server(
            server, run_scheduler_process_func=functools.partial(run_scheduler, args.switch)
        )


if __name__ == "__main__":
    import server

    os.environ.update(SETTINGS)
    sys.exit(server.main())
