from __future__ import annotations

import logging
import threading
import warnings

import pytest

from aitune_core._quiet import quiet_compilers

LOUD = logging.getLogger("torch._inductor.loud_in_a_test")


def test_warnings_and_records_of_compilers_are_dropped(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet_compilers():
        LOUD.warning("noise")
        LOUD.error("noise")
        warnings.warn("noise", stacklevel=1)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


def test_what_others_log_comes_through(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOUD.name)
    with quiet_compilers():
        logging.getLogger("torchlike").warning("mine")
        LOUD.info("asked for")
        other = threading.Thread(target=lambda: LOUD.warning("of another thread"))
        other.start()
        other.join()
    assert caplog.messages == ["mine", "asked for", "of another thread"]


def test_all_is_as_before_even_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    import torch.export._trace as tracing  # noqa: PLC0415

    handlers = [*logging.root.handlers, *logging.getLogger("torch").handlers]
    before = [list(handler.filters) for handler in handlers]
    with pytest.raises(ZeroDivisionError), quiet_compilers():
        _ = 1 / 0
    assert [list(handler.filters) for handler in handlers] == before
    assert "print" not in vars(tracing)
    LOUD.warning("heard")
    assert caplog.messages == ["heard"]
