"""`max_factor_dim="auto"`: no refresh of many seconds unless it is asked for, and one line on what is diagonal."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from secondorder import EKFAC, KFAC
from secondorder.curvature.factors import default_bound


def wide(n: int) -> nn.Sequential:
    """Made without data, so that nothing of the width is computed."""
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, n, bias=False))


def told(make) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = make()
    made.close()
    return [str(w.message) for w in found]


def sizes(opt) -> str:
    return next(line for line in opt.describe().splitlines() if line.startswith("1.weight"))


def quiet(method, model, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method(model, **keywords)


@pytest.mark.parametrize(
    ("method", "keywords", "bound"),
    [(KFAC, {}, 2048), (EKFAC, {}, 2048), (KFAC, {"inverse_method": "cholesky"}, 4096)],
)
def test_the_widest_dense_side_on_a_cpu(method, keywords, bound):
    assert told(lambda: method(wide(bound), **keywords)) == []
    assert "diagonal" not in sizes(method(wide(bound), **keywords))
    (text,) = told(lambda: method(wide(bound + 1), **keywords))
    assert f"more than {bound} rows" in text
    assert f"1 (outputs, {bound + 1})" in text
    assert "max_factor_dim=8192" in text
    assert f"diagonal {bound + 1}" in sizes(quiet(method, wide(bound + 1), **keywords))


def test_a_bound_that_is_given_stays_and_says_nothing():
    for bound in (2048, 8192, None):
        assert told(lambda bound=bound: KFAC(wide(2100), max_factor_dim=bound)) == []
        opt = KFAC(wide(2100), max_factor_dim=bound)
        assert opt.param_groups[0]["max_factor_dim"] == bound
        assert ("diagonal" in sizes(opt)) == (bound == 2048)


def test_many_wide_layers_are_one_line_and_a_vocabulary_of_a_large_model_none():
    (text,) = told(lambda: KFAC(nn.Sequential(*(nn.Linear(2100, 2, bias=False) for _ in range(9)))))
    assert "0 (inputs, 2100), 1 (inputs, 2100)" in text
    assert "and 5 more" in text
    assert told(lambda: KFAC(wide(8193))) == []  # nobody expects a matrix of that size


def test_groups_choose_by_their_own_way():
    model = wide(3000)
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "inverse_method": "cholesky"},
    ]
    assert told(lambda: KFAC(groups, module=model)) == []
    found = [group["max_factor_dim"] for group in KFAC(groups, module=model).param_groups]
    assert found == [2048, 4096]
    groups[1]["max_factor_dim"] = 100
    assert told(lambda: KFAC(groups, module=model)) == []
    assert KFAC(groups, module=model).param_groups[1]["max_factor_dim"] == 100
    groups[1]["max_factor_dim"] = "auto"
    assert KFAC(groups, module=model, max_factor_dim=7).param_groups[1]["max_factor_dim"] == 4096


def test_other_devices_keep_wider_factors():
    assert default_bound("cuda", "eigen") == default_bound("cuda", "cholesky") == 8192
    with torch.device("meta"):
        model = wide(3000)
    assert KFAC(model).param_groups[0]["max_factor_dim"] == 8192


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_a_file_with_a_dense_factor_loads_and_goes_on_with_it(method):
    """Files of the former default, 8192: the bound is an option of the group, which a checkpoint brings."""
    n, x = 2060, torch.randn(5, 3)
    options = {"lr": 0.01, "inv_update_steps": 0}  # statistics alone: no refresh of this size in a test
    before, after = wide(n), wide(n)
    after.load_state_dict(before.state_dict())
    old, new = method(before, max_factor_dim=8192, **options), quiet(method, after, **options)
    before(x).square().mean().backward()
    old.step()
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    new.load_state_dict(torch.load(file, weights_only=True))
    assert new.param_groups[0]["max_factor_dim"] == 8192
    assert "diagonal" not in sizes(new)
    assert torch.equal(new.state[after[1].weight]["factor_g"], old.state[before[1].weight]["factor_g"])


def test_copies_choose_as_the_original():
    model = wide(10)
    for copied in (copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))):
        opt = copied(KFAC(model))
        late = nn.Parameter(torch.zeros(2))
        opt.attach(copy.deepcopy(model))
        opt.add_param_group({"params": [late], "inverse_method": "cholesky"})
        assert opt.param_groups[1]["max_factor_dim"] == 4096


def test_another_value_is_refused():
    for value in ("none", 2.5, True):
        with pytest.raises(TypeError, match="max_factor_dim must be an integer"):
            KFAC(wide(10), max_factor_dim=value)
