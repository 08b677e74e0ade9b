"""The command ``flint``, the same as ``python -m flint_jax``: serve, chat, generate, score, info and others."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Sequence

from flint_jax.command_line import Parser, missing
from flint_jax.errors import FlintError

_OWN_FLAGS = ("serve", "bench", "convert", "synthetic")  # commands whose modules read the rest of the line themselves
_RAW_TOKENS, _CHAT_TOKENS = 256, 4096  # what --max-tokens is by default: a text may never end, a reply does


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit code 0, or 2 with one line on standard error for anything the user can mend."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = bool(words) and words[0] in _OWN_FLAGS
    command = f"flint_jax {words[0]}" if words and not words[0].startswith("-") else "flint_jax"
    try:
        args = _parser().parse_args(words[:1] if own else words)
        args.rest = words[1:]
        if args.run is not _serve:  # it shows its log itself, with levels
            _show_log()
        return args.run(args)
    except SystemExit as end:  # of argparse, which has said what is wrong, or has given help
        return end.code if isinstance(end.code, int) else 0
    except FlintError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (cure := missing(error)) is None:
            raise
        print(f"{command}: error: {cure}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:  # a path that cannot be read or written, a full disk, a server that does not answer
        print(f"{command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _show_log() -> None:
    """Our own loggers to standard error; those of libraries keep their settings."""
    for name in ("flint_jax", "loaders"):
        log = logging.getLogger(name)
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(message)s"))
            log.addHandler(handler)
        log.setLevel(logging.INFO)


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import version

        from flint_jax import __version__

        print(f"flint-jax {__version__} (jax {version('jax')}, Python {sys.version.split()[0]})")
        parser.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="flint", description="Flint in JAX, from the command line.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="an OpenAI- and Anthropic-compatible server, as serve.py", add_help=False)
    serve.set_defaults(run=_serve)

    info = commands.add_parser("info", help="what a checkpoint holds, without reading its weights")
    _model_flags(info, load=False)
    info.add_argument(
        "--roofline", action="store_true", help="bytes and operations of a step, and the floor of its time"
    )
    info.add_argument("--batch", type=int, default=1, help="for --roofline: requests in a decode step")
    info.add_argument("--context", type=int, help="for --roofline: tokens that each holds (default 8192)")
    info.add_argument("--device", default="h200", help="for --roofline: a100, h100, h200 or b200")
    info.add_argument("--bandwidth", type=float, help="for --roofline: another memory bandwidth, TB/s")
    info.add_argument("--tflops", type=float, help="for --roofline: another bfloat16 peak, TFLOP/s")
    info.add_argument("--memory", action="store_true", help="what would fit on a GPU, by arithmetic (no GPU needed)")
    info.add_argument("--device-gib", type=float, default=140.0, help="for --memory: the GPU's memory (default 140)")
    info.add_argument("--max-model-len", type=int, help="for --memory: as of serve.py")
    info.add_argument("--max-num-seqs", type=int, help="for --memory: as of serve.py")
    info.add_argument("--max-num-batched-tokens", type=int, help="for --memory: as of serve.py")
    info.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="for --memory: as of serve.py")
    info.set_defaults(run=_info)

    generate = commands.add_parser("generate", help="answer one message, or continue a text")
    _model_flags(generate)
    generate.add_argument("prompt", help="a message for the model; - reads standard input")
    generate.add_argument("--raw", action="store_true", help="no chat template: the prompt is text to be continued")
    generate.add_argument("--system", help="system message")
    _sampling_flags(generate)
    generate.add_argument("--json", action="store_true", help="print token ids and the finish reason too, as JSON")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to the model in the terminal")
    _model_flags(chat)
    _sampling_flags(chat)
    chat.add_argument("--system", help="system message")
    chat.add_argument("--tools", metavar="FILE", help="JSON file with a list of tools, as in OpenAI's API")
    chat.set_defaults(run=_chat)

    bench = commands.add_parser("bench", help="time decoding, loading, or a running server", add_help=False)
    bench.set_defaults(run=_bench)

    score = commands.add_parser("score", help="log-probabilities for a file of texts or (context, continuation) pairs")
    _model_flags(score)
    _score_flags(score)
    score.set_defaults(run=_score)

    evaluate = commands.add_parser("eval", help="exact answers on held-out exercises: tools, look-ups, arithmetic ...")
    _model_flags(evaluate)
    _eval_flags(evaluate)
    evaluate.set_defaults(run=_eval)

    convert = commands.add_parser("convert", help="between GGUF, safetensors and Orbax", add_help=False)
    convert.set_defaults(run=_convert)

    synthetic = commands.add_parser("synthetic", help="write a random checkpoint", add_help=False)
    synthetic.set_defaults(run=_synthetic)
    return parser


def _model_flags(parser: argparse.ArgumentParser, load: bool = True) -> None:
    parser.add_argument("--model", help="folder, .gguf file or hub id (default: the small embedded model)")
    parser.add_argument("--config", help="folder whose config.json wins over the checkpoint's own")
    parser.add_argument("--tokenizer", help="folder whose tokenizer wins over the checkpoint's own")
    if load:
        parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
        parser.add_argument("--numerics", default="serving", choices=("serving", "transformers"))
        parser.add_argument("--kernels", default="auto", choices=("auto", "xla", "pallas"))


def _sampling_flags(parser: argparse.ArgumentParser) -> None:
    for name in ("temperature", "top-p", "min-p", "repetition-penalty"):
        parser.add_argument(f"--{name}", type=float, help="default: the checkpoint's own")
    parser.add_argument("--top-k", type=int, help="default: the checkpoint's own")
    parser.add_argument("--max-tokens", type=int, help=f"default: {_CHAT_TOKENS}, with --raw {_RAW_TOKENS}")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the model may think (default: as it likes)",
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")


def _score_flags(parser: argparse.ArgumentParser) -> None:
    from flint_jax.scoring.command import arguments

    arguments(parser)


def _eval_flags(parser: argparse.ArgumentParser) -> None:
    from flint_jax.evals.command import arguments

    arguments(parser)


def _path(args: argparse.Namespace) -> str:
    if args.model is not None:
        return args.model
    from loaders import embedded_checkpoint

    return str(embedded_checkpoint())


def _load(args: argparse.Namespace):
    from flint_jax import memory
    from flint_jax.lm import load

    memory.prepare_process()
    return load(
        _path(args),
        dtype=args.dtype,
        numerics=args.numerics,
        kernels=args.kernels,
        config=args.config,
        tokenizer=args.tokenizer,
    )


def _params(args: argparse.Namespace, max_tokens: int):
    from flint_jax.sampling_params import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_tokens=max_tokens if args.max_tokens is None else args.max_tokens,
        seed=args.seed,
        stop=tuple(args.stop),
    )


def _info(args: argparse.Namespace) -> int:
    from loaders import open_checkpoint

    ckpt = open_checkpoint(_path(args), config=args.config, tokenizer=args.tokenizer)
    c = ckpt.config
    print(f"{ckpt.name}: {ckpt.format}, {ckpt.weight_format} weights, {ckpt.nbytes / 1e9:.2f} GB")
    print(f"{c.num_parameters / 1e9:.3f} B parameters, context {c.max_position_embeddings:,} tokens")
    print(
        f"{c.num_hidden_layers} layers ({len(c.full_layers)} full, {len(c.sliding_layers)} with a window of "
        f"{c.sliding_window}; {len(c.moe_layers)} with {c.num_experts} experts, {c.num_experts_per_tok} active)"
    )
    print(f"tokenizer: {'yes' if ckpt.tokenizer else 'none'}; chat template: {'yes' if ckpt.chat_template else 'none'}")
    print(f"sampling defaults: {json.dumps(ckpt.generation)}")
    if args.roofline:
        print(_roofline(args, ckpt))
    if args.memory:
        print(_memory(args, ckpt))
    return 0


def _memory(args: argparse.Namespace, ckpt) -> str:
    from flint_jax import memory_table

    longest = ckpt.config.max_position_embeddings
    return memory_table.table(
        ckpt.config,
        "nvfp4" if ckpt.weight_format == "nvfp4" else "bf16",
        args.device_gib,
        max_model_len=longest if args.max_model_len is None else min(args.max_model_len, longest),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        utilization=args.gpu_memory_utilization,
    )


def _roofline(args: argparse.Namespace, ckpt) -> str:
    import dataclasses

    from flint_jax import roofline
    from flint_jax.errors import RequestError

    device = roofline.DEVICES.get(args.device.lower())
    if device is None:
        raise RequestError(
            f"--device {args.device}: need one of {', '.join(roofline.DEVICES)}; --bandwidth and --tflops describe "
            "others"
        )
    longest = ckpt.config.max_position_embeddings
    context = min(8192, longest) if args.context is None else args.context
    if args.batch < 1 or not 1 <= context <= longest:
        raise RequestError(
            f"--batch {args.batch} --context {context}: need a batch of 1 or more and a context of 1 to {longest}"
        )
    for flag, value in (("--bandwidth", args.bandwidth), ("--tflops", args.tflops)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise RequestError(f"{flag} {value}: need a number above 0")
    own = {"bandwidth": args.bandwidth and args.bandwidth * 1e12, "flops": args.tflops and args.tflops * 1e12}
    own = {name: value for name, value in own.items() if value}
    device = dataclasses.replace(device, **own, **({"name": "a device"} if len(own) == 2 else {}))
    weight_format = "nvfp4" if ckpt.weight_format == "nvfp4" else "bf16"  # "mixed" is kept in bfloat16
    return roofline.table(ckpt.config, device, batch=args.batch, context=context, weight_format=weight_format)


def _generate(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.raw and (args.system or args.thinking is not None):
        raise FlintError("--raw has no chat template, so --system and --thinking have no place; leave them out")
    params = _params(args, _RAW_TOKENS if args.raw else _CHAT_TOKENS)
    lm = _load(args)
    raw = args.raw or not lm.chat_template
    if raw and not args.raw:
        if args.system or args.thinking is not None:
            raise FlintError(
                f"{lm.name} has no chat template, so --system and --thinking have no place; leave them out"
            )
        print(f"{lm.name} has no chat template: the prompt is continued as text (--raw)", file=sys.stderr)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": prompt})
    options = {} if args.thinking is None else {"enable_thinking": args.thinking}
    stream = lm.generate(prompt if raw else messages, params, stream=True, **options)
    return _print_json(stream.generation, raw) if args.json else _print_stream(stream)


def _print_json(reply, raw: bool) -> int:
    found = {"text": reply.text, "token_ids": reply.token_ids, "finish_reason": reply.finish_reason}
    print(json.dumps(found if raw else found | {"reasoning": reply.reasoning}))
    return 0


def _print_stream(stream) -> int:
    from flint_jax.terminal import Printer

    printer = Printer(sys.stdout)
    try:
        with stream:
            for piece in stream:
                printer.write(piece)
    finally:
        printer.close()
    if stream.generation.finish_reason == "length":
        print("(cut: --max-tokens, or the end of the context)", file=sys.stderr)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from flint_jax.terminal import Chat, read_tools

    params = _params(args, _CHAT_TOKENS)
    if args.tools:
        read_tools(args.tools)  # before the model is loaded
    return Chat(_load(args), params, system=args.system, thinking=args.thinking, tools=args.tools).run()


def _serve(args: argparse.Namespace) -> int:
    from flint_jax.server import launch

    return launch.main(args.rest, program="flint serve")


def _score(args: argparse.Namespace) -> int:
    from flint_jax.scoring import command

    return command.run(args, lambda: _load(args))


def _eval(args: argparse.Namespace) -> int:
    from flint_jax.evals import command

    return command.run(args, lambda: _load(args))


def _bench(args: argparse.Namespace) -> int:
    if args.rest[:1] == ["serve"]:  # a client: needs no device
        from flint_jax.load_test import run

        return run.main(args.rest[1:])
    if args.rest[:1] == ["full"]:  # the device is its server's
        from flint_jax.full_bench import run as full

        return full.main(args.rest[1:])
    from flint_jax import bench, memory

    memory.prepare_process()
    return bench.main(args.rest)


def _convert(args: argparse.Namespace) -> int:
    from loaders import convert

    return convert.main(args.rest)


def _synthetic(args: argparse.Namespace) -> int:
    from loaders import synthetic

    return synthetic.main(args.rest) or 0


def entry() -> None:
    """What the console script runs: ``main`` and its exit code; a reader that closes our output early is no error."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    entry()
