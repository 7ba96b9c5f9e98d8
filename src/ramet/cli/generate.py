"""``ramet generate``: samples of one or many prompts, as text or as JSONL that a later run can go on with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from ramet.cli.common import (
    ENGINE_FIELDS,
    Context,
    add_common_options,
    add_engine_options,
    add_sampling_options,
    effective_sampling,
    require_model,
)
from ramet.cli.environment import versions
from ramet.cli.options import Parser, Settings
from ramet.cli.prompts import Prompt, read_prompts
from ramet.cli.results import ResultsFile, record
from ramet.errors import InvalidArgument
from ramet.logs import LOGGER
from ramet.outputs import RequestOutput
from ramet.sampling_params import SamplingParams

USAGE = "MODEL [options]"
DESCRIPTION = (
    "Sample continuations of prompts. Without --output the samples are printed; with it, each prompt becomes a "
    "JSON line as soon as it is finished, and running the same command again does only what is missing."
)
MAX_TOKENS = 256  # SamplingParams' own 16 is too short for someone who looks at the text
_SEED_HELP = (
    "Prompt i is sampled with the seed plus i, so the same command gives the same samples; also of dummy weights."
)


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Prompts", "Without any of these, all of stdin is one prompt.")
    parser.option(
        group, "--prompt", default=(), action="append", metavar="TEXT", help="A prompt; may be repeated. '-' is stdin."
    )
    parser.option(group, "--prompts-file", metavar="FILE", help="Text file with a prompt a line. '-' is stdin.")
    parser.option(
        group,
        "--jsonl",
        metavar="FILE",
        help="JSONL file; a line has 'prompt', 'prompt_token_ids' or 'messages', and may have 'id', 'seed' and "
        "sampling parameters of its own. '-' is stdin.",
    )
    parser.option(
        group,
        "--keep-extra-fields",
        default=False,
        action="store_true",
        help="Carry other fields of JSONL lines to the output as 'extra'; they are refused otherwise.",
    )
    parser.option(
        group,
        "--chat",
        default=False,
        action="store_true",
        help="Put each text prompt into the model's chat template, as the user's message.",
    )
    parser.option(group, "--system", metavar="TEXT", help="System message in front of it, with --chat.")
    group = parser.add_argument_group("Output")
    parser.option(
        group, "--output", "-o", metavar="FILE", help="JSONL file to append to and to go on with. '-' is stdout."
    )
    parser.option(group, "--overwrite", default=False, action="store_true", help="Begin the output file anew.")
    parser.option(
        group,
        "--token-ids",
        default=False,
        action="store_true",
        help="Keep the ids of prompts and samples in the JSONL.",
    )
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_engine_options(parser, seed_help=_SEED_HELP)
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    require_model(settings)
    _check(settings)
    prompts = read_prompts(
        prompts=settings["prompt"],
        prompts_file=settings["prompts_file"],
        jsonl=settings["jsonl"],
        stdin=context.stdin,
        keep_extra_fields=settings["keep_extra_fields"],
    )
    if settings["output"] is None:
        _check_text(settings, prompts)
    path = settings["output"]
    to_file = path is not None and path != "-"
    with ExitStack() as stack:  # the file before the model: a wrong path costs no time
        results = stack.enter_context(ResultsFile(path, overwrite=settings["overwrite"])) if to_file else None
        llm = stack.enter_context(context.start(settings))
        return _run(settings, context, llm, prompts, results)


def _check(settings: Settings) -> None:
    if settings["system"] is not None and not settings["chat"]:
        raise InvalidArgument("--system needs --chat, which puts prompts into the chat template.")
    if settings["output"] is None:
        for name in ("token_ids", "overwrite", "keep_extra_fields"):
            if settings[name]:
                raise InvalidArgument(f"--{name.replace('_', '-')} needs --output.")
    elif not settings["output"]:
        raise InvalidArgument("--output is empty; allowed: a file, or '-' for stdout.")


def _check_text(settings: Settings, prompts: Sequence[Prompt]) -> None:
    """Refuse what would print nothing."""
    silent = [prompt.where for prompt in prompts if prompt.overrides.get("detokenize") is False]
    if not settings["detokenize"] or silent:
        where = f"{silent[0]}: detokenize is false, which" if silent else "--no-detokenize"
        raise InvalidArgument(f"{where} needs --output and --token-ids: there is no text to print.")


def _run(settings: Settings, context: Context, llm: Any, prompts: Sequence[Prompt], results: ResultsFile | None) -> int:
    base = effective_sampling(llm, settings, {"max_tokens": MAX_TOKENS})
    prompts = [_as_chat(p, settings["system"]) for p in prompts] if settings["chat"] else prompts
    params = [_params_of(prompt, base, settings["seed"]) for prompt in prompts]
    origin = {"model": settings["model"], "engine": settings.given(ENGINE_FIELDS), "versions": versions()}
    work = list(zip(prompts, params, strict=True))
    if results is not None:
        work = [(prompt, p) for prompt, p in work if not results.has(prompt, p, origin)]
        if len(work) < len(prompts):
            LOGGER.info(
                "%s: %d of %d prompts are finished already", results.path, len(prompts) - len(work), len(prompts)
            )
    done = len(prompts) - len(work)
    try:
        to_file = settings["output"] is not None and settings["output"] != "-"
        use_tqdm = not settings["quiet"] and context.stderr.isatty()
        for prompt, own, output in _finished(llm, work, in_order=not to_file, use_tqdm=use_tqdm):
            if settings["output"] is None:
                context.write(_as_text(prompt, output, titled=len(prompts) > 1))
            else:
                entry = record(prompt, own, output, origin, token_ids=settings["token_ids"])
                results.append(entry) if results is not None else context.write_json(entry)
            done += 1
    except KeyboardInterrupt:
        again = "; the same command goes on from there" if results is not None else ""
        raise KeyboardInterrupt(f"{done} of {len(prompts)} prompts are finished{again}") from None
    return 0


def _as_chat(prompt: Prompt, system: str | None) -> Prompt:
    if prompt.kind != "prompt":
        return prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    return dataclasses.replace(prompt, kind="messages", value=[*messages, {"role": "user", "content": prompt.value}])


def _params_of(prompt: Prompt, base: SamplingParams, seed: int) -> SamplingParams:
    """A prompt's own parameters. The seed goes with its place in the input, so a resumed run draws the same samples."""
    try:
        return dataclasses.replace(base, **{"seed": (seed + prompt.index) % 2**64, **prompt.overrides})
    except (InvalidArgument, TypeError) as error:
        raise InvalidArgument(f"{prompt.where}: {error}") from None


def _finished(
    llm: Any, work: Sequence[tuple[Prompt, SamplingParams]], *, in_order: bool, use_tqdm: bool
) -> Iterator[tuple[Prompt, SamplingParams, RequestOutput]]:
    """Yield each prompt, its parameters and its answer as soon as it is finished, or in the order of the prompts."""
    if not work:
        return
    inputs = [_input(llm, prompt) for prompt, _ in work]
    held: dict[int, RequestOutput] = {}
    turn = 0
    try:
        answers = llm.as_completed(inputs, [params for _, params in work], use_tqdm=use_tqdm)
    except InvalidArgument as error:
        where, error.prompt = work[error.prompt or 0][0].where, None
        raise InvalidArgument(f"{where}: {error}") from None
    for i, output in answers:
        if not in_order:
            yield *work[i], output
            continue
        held[i] = output
        while turn in held:
            yield *work[turn], held.pop(turn)
            turn += 1


def _input(llm: Any, prompt: Prompt) -> Any:
    if prompt.kind != "messages":
        return {prompt.kind: prompt.value}
    try:
        return {"prompt_token_ids": llm.tokenizer.apply_chat_template(prompt.value)}
    except InvalidArgument as error:
        raise InvalidArgument(f"{prompt.where}: {error}") from None


def _as_text(prompt: Prompt, output: RequestOutput, titled: bool) -> str:
    """The samples of a prompt for people: a line above each when there are several, the bare text of a single one."""
    lines = [f"=== prompt {prompt.index if prompt.id is None else prompt.id} ==="] if titled else []
    for sample in output.outputs:
        if len(output.outputs) > 1:
            lines.append(f"--- sample {sample.index} ({len(sample.token_ids)} tokens, {sample.finish_reason}) ---")
        lines.append(sample.text)
    return "\n".join(lines)
