"""A sandbox hides the machine from a verifier, and recipes that need one are refused without it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil

import pytest

from extras.policy_programs import sandbox
from kit.errors import ConfigError
from tests.helpers.recipes import load, row, write_rows
from tests.helpers.verifiers import (
    MATH_ROW,
    PROGRAM_ROW,
    enter_hostile_folder,
    make_router,
    needs_bubblewrap,
    run_session,
)


@pytest.fixture
def build_router(tmp_path, monkeypatch):
    """A function that makes a router: build_router("my.py:look_around")."""
    enter_hostile_folder(tmp_path, monkeypatch)
    return functools.partial(make_router, tmp_path, timeout_s=60.0, memory_gb=2.0)


@needs_bubblewrap
def test_a_sandbox_hides_files_processes_and_the_network(build_router, tmp_path):
    secret = tmp_path / "mine" / "rows.jsonl"  # next to the verifier, in the working directory
    secret.write_text("x")
    visible = {}  # {sandbox: what the verifier could see or do}

    async def look_with_and_without_sandbox():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        targets = f"127.0.0.1 {port} {secret} {tmp_path / 'mine'}"
        async with server:
            for kind in (None, "bwrap"):
                async with build_router("my.py:look_around", sandbox=kind) as router:
                    (result,) = await run_session(router, targets)
                    visible[kind] = json.loads(result.details["visible"])
                    written = tmp_path / "mine" / "written"
                    visible[kind]["writes"] = written.exists()
                    written.unlink(missing_ok=True)

    assert sandbox.find_problem() == ""
    asyncio.run(look_with_and_without_sandbox())
    outside = visible[None]
    inside = visible["bwrap"]
    assert (outside["secret"], outside["writes"], outside["network"]) == (True, True, True)
    assert (inside["secret"], inside["writes"], inside["network"]) == (False, False, False)
    assert inside["processes"] < 5 < outside["processes"]


# --- recipes --------------------------------------------------------------------------------------


def test_a_sandbox_that_is_not_installed_is_an_error_before_the_run(workspace, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    sandbox.find_problem.cache_clear()
    message = r"sandbox=bwrap: bubblewrap is not installed. Install it"
    try:
        with pytest.raises(ConfigError, match=message):
            load(workspace, "env.verifier=verl", "env.verifier_pool.sandbox=bwrap")
    finally:
        sandbox.find_problem.cache_clear()


def test_a_recipe_whose_responses_verl_evaluates_is_refused(workspace):
    rows = [row(f"add {n}", **MATH_ROW) for n in range(8)]
    path = write_rows(workspace / "math.jsonl", rows)
    changes = [f"env.train_files=[{path}]", "env.val_files=[]", "data.max_prompt_length=64"]
    # SandboxFusion runs programs, but not the expressions in mathematical answers.
    verifier = "env.verifier={function: verl, sandbox_fusion_url: 'http://127.0.0.1:9/run_code'}"
    with pytest.raises(ConfigError, match="verl runs the policy's code on this machine"):
        load(workspace, *changes, verifier)


def test_a_recipe_whose_rows_run_programs_is_refused_unless_it_allows_that(workspace):
    rows = [row(f"write {n}", **PROGRAM_ROW) for n in range(8)]
    path = write_rows(workspace / "code.jsonl", rows)
    changes = [
        f"env.train_files=[{path}]",
        "env.val_files=[]",
        "env.verifier=verl",
        "data.max_prompt_length=64",
    ]
    message = (
        r"verl runs the policy's code on this machine, as your user, without a sandbox. "
        r"Set .*allow_unsandboxed_code.* See docs/"
    )
    with pytest.raises(ConfigError, match=message):
        load(workspace, *changes)
    load(workspace, *changes, "env.allow_unsandboxed_code=true")
    if shutil.which("bwrap"):
        load(workspace, *changes, "env.verifier_pool.sandbox=bwrap")


def test_a_server_that_runs_programs_starts_only_if_the_recipe_allows_it(workspace):
    start = "gym.servers.reasoning_gym.start.server=code_gen"
    message = r"reasoning_gym runs the policy's code .* container and give its url"
    with pytest.raises(ConfigError, match=message):
        load(workspace, start)
    load(workspace, start, "env.allow_unsandboxed_code=true")
