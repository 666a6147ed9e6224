from __future__ import annotations

import json

import attrs
import pytest
from fakes import AffineBackend, FakeBackend, FakeConfig, Fault

from aitune_core import BackendConfig, ConfigError


def test_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        FakeConfig.from_options({"falt": "zeros"})
    assert caught.value.field == "falt"
    assert caught.value.value == "zeros"
    assert caught.value.allowed == ("fault", "label")


def test_configuration_without_options_says_that_it_has_none() -> None:
    with pytest.raises(ConfigError) as caught:
        BackendConfig.from_options({"x": 1})
    assert caught.value.allowed == ()


def test_options_round_trip_through_json() -> None:
    config = FakeConfig(fault=Fault.ZEROS, label="a")
    options = json.loads(json.dumps(config.to_options()))
    assert options == {"fault": "zeros", "label": "a"}
    assert FakeConfig.from_options(options) == config


def test_invalid_option_values_are_errors_that_callers_guess() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        FakeConfig.from_options({"fault": "nonsense"})
    with pytest.raises((TypeError, ConfigError)):
        FakeConfig.from_options({"label": 3})


def test_configuration_cannot_be_changed() -> None:
    config = FakeConfig()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.label = "b"  # type: ignore[misc]


def test_backend_refuses_the_configuration_of_another() -> None:
    with pytest.raises(ConfigError) as caught:
        AffineBackend(BackendConfig())
    assert caught.value.field == "config"
    assert caught.value.allowed == "FakeConfig"


def test_backends_are_equal_when_class_and_configuration_are() -> None:
    assert FakeBackend(label="a") == FakeBackend(label="a")
    assert hash(FakeBackend(label="a")) == hash(FakeBackend(label="a"))
    assert FakeBackend(label="a") != FakeBackend(label="b")
    assert FakeBackend() != AffineBackend()
    assert repr(FakeBackend(label="a")).startswith("FakeBackend(FakeConfig(")
