"""The catalog: published sizes, layouts as frameworks make them, refusals in one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_reshard.errors import CatalogError, LayoutError
from elastic_reshard.layout import Mesh, Replicate, Shard, StridedShard, match
from elastic_reshard.layout.catalog import Kind, Parallelism, known_models, layout, model


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-14B", 14_768_307_200),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_models_have_their_published_size(name: str, numel: int) -> None:
    spec = model(name)
    assert spec.numel == numel
    assert layout(spec, Parallelism(fsdp=4)).nbytes == 2 * numel
    assert len({p.name for p in spec.parameters}) == len(spec.parameters)


def test_names_and_shapes_are_hugging_faces() -> None:
    dense = {p.name: p for p in model("qwen3-0.6b").parameters}
    assert dense["model.layers.27.self_attn.k_proj.weight"].shape == (1024, 1024)
    assert dense["model.layers.0.self_attn.q_proj.weight"].shape == (2048, 1024)
    assert dense["model.layers.0.self_attn.q_norm.weight"].shape == (128,)
    assert dense["model.layers.0.mlp.down_proj.weight"].kind is Kind.ROW
    assert "lm_head.weight" not in dense
    assert next(iter(dense)) == "model.embed_tokens.weight"
    moe = {p.name: p for p in model("Qwen/Qwen3-30B-A3B").parameters}
    assert moe["model.layers.47.mlp.experts.up_proj"].shape == (128, 768, 2048)
    assert moe["model.layers.47.mlp.experts.down_proj"].shape == (128, 2048, 768)
    assert moe["model.layers.0.mlp.gate.weight"].shape == (128, 2048)
    assert moe["lm_head.weight"].layer is None


@pytest.mark.parametrize("name", known_models())
@pytest.mark.parametrize("text", ["fsdp4", "tp4", "tp2dp2", "tp2pp2", "fsdp3tp2", "pp2dp2fsdp2tp2", "fsdp7"])
def test_local_bytes_add_up_to_every_replica(name: str, text: str) -> None:
    spec, p = model(name), Parallelism.parse(text)
    placed = layout(spec, p, "float32", first_rank=10)
    copies = {t.name: p.dp * (p.tp if t.kind is Kind.REPLICATED else 1) for t in spec.parameters}
    want = sum(placed[t.name].nbytes * copies[t.name] for t in spec.parameters)
    assert sum(placed.local_nbytes(r) for r in range(10, 10 + p.world)) == want
    assert placed.local_nbytes(9) == placed.local_nbytes(10 + p.world) == 0
    assert match(placed, layout(spec, Parallelism(), "float32"))


def test_fsdp_over_tp_is_strided_where_both_cut_dim_0() -> None:
    placed = layout(model("tiny"), Parallelism(fsdp=3, tp=2))
    at = "model.layers.0"
    assert placed[f"{at}.mlp.up_proj.weight"].placements == (StridedShard(0, 2), Shard(0))
    assert placed["model.embed_tokens.weight"].placements == (StridedShard(0, 2), Shard(0))
    assert placed[f"{at}.mlp.down_proj.weight"].placements == (Shard(0), Shard(1))
    assert placed[f"{at}.input_layernorm.weight"].placements == (Shard(0), Replicate())
    assert placed["model.norm.weight"].mesh == Mesh.arange((3, 2), ("fsdp", "tp"))


def test_experts_are_cut_by_ep_and_tp_all_else_is_replicated_over_ep() -> None:
    placed = layout(model("tiny-moe"), Parallelism(ep=4, tp=2, dp=2))
    at = "model.layers.1"
    assert placed[f"{at}.mlp.experts.gate_proj"].placements == (Replicate(), Shard(0), Shard(1))
    assert placed[f"{at}.mlp.experts.up_proj"].placements == (Replicate(), Shard(0), Shard(1))
    assert placed[f"{at}.mlp.experts.down_proj"].placements == (Replicate(), Shard(0), Shard(2))
    assert placed[f"{at}.mlp.gate.weight"].placements == (Replicate(),) * 3
    assert placed[f"{at}.self_attn.q_proj.weight"].placements == (Replicate(), Replicate(), Shard(0))
    assert [placed[f"{at}.mlp.experts.down_proj"].local_shape(r) for r in (0, 2, 4, 6)] == [
        (2, 64, 16),
        (2, 64, 16),
        (2, 64, 16),
        (0, 64, 16),
    ]
    with_fsdp = layout(model("tiny-moe"), Parallelism(fsdp=2, ep=3))
    assert with_fsdp[f"{at}.mlp.experts.gate_proj"].placements == (StridedShard(0, 3), Shard(0))
    assert with_fsdp[f"{at}.mlp.gate.weight"].placements == (Shard(0), Replicate())


def test_pipeline_stages_are_contiguous_ranks_with_contiguous_layers() -> None:
    placed = layout(model("qwen3-0.6b"), Parallelism(pp=3, tp=2), first_rank=4)
    stages = {name: t.mesh.ranks for name, t in placed.items()}
    assert stages["model.embed_tokens.weight"] == (4, 5)
    assert stages["model.norm.weight"] == (8, 9)
    by_layer = [stages[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(28)]
    assert by_layer == sorted(by_layer)
    assert [by_layer.count(r) for r in ((4, 5), (6, 7), (8, 9))] == [10, 9, 9]
    untied = layout(model("qwen3-8b"), Parallelism(pp=2))
    assert untied["lm_head.weight"].mesh.ranks == (1,)
    assert untied["model.embed_tokens.weight"].mesh.ranks == (0,)


def test_one_rank_is_still_a_mesh() -> None:
    placed = layout(model("tiny"), Parallelism())
    assert placed["model.norm.weight"].mesh == Mesh.arange((1,), ("dp",))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("fsdp4", Parallelism(fsdp=4)),
        ("TP2xDP2", Parallelism(tp=2, dp=2)),
        ("tp2 pp2", Parallelism(tp=2, pp=2)),
        ("EP16", Parallelism(ep=16)),
        ("  Tp=8,  DP=625 ", Parallelism(tp=8, dp=625)),
        ("tp1", Parallelism()),
        ("pp2*fsdp3*tp4", Parallelism(pp=2, fsdp=3, tp=4)),
    ],
)
def test_parallelisms_are_read(text: str, want: Parallelism) -> None:
    p = Parallelism.parse(text)
    assert p == want
    assert Parallelism.parse(str(p)) == p


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the parallelism ''"),
        ("tp", "cannot read"),
        ("4", "cannot read"),
        ("tp2x2", "cannot read"),
        ("tp-2", "cannot read"),
        ("tp2.5", "cannot read"),
        ("cp2", "cannot read"),
        ("tp" + "9" * 5000, "cannot read"),
        ("tp0", "tp must be at least 1, got 0"),
        ("tp2tp4", "names an axis twice"),
        ("dp1000000 tp8", "needs 8000000 ranks"),
    ],
)
def test_bad_parallelisms_get_one_sentence(text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as refused:
        Parallelism.parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qwen3-4b", "ep2", "Qwen3-4B is dense and has no experts"),
        ("qwen3-0.6b", "tp3", "16 attention heads, which tp3 does not divide"),
        ("qwen3-0.6b", "tp16", "8 key/value heads, fewer than tp16"),
        ("qwen3-14b", "tp5", "8 key/value heads, which tp5 does not divide"),
        ("qwen3-0.6b", "pp29", "28 layers, fewer than pp29"),
        ("qwen3-30b-a3b", "ep129", "128 experts a layer, fewer than ep129"),
        ("qwen3-30b-a3b", "tp8", "4 key/value heads, fewer than tp8"),
    ],
)
def test_impossible_parallelisms_get_one_sentence(name: str, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as refused:
        layout(model(name), Parallelism.parse(text))
    assert "\n" not in str(refused.value)


def test_unknown_models_get_the_list_and_the_nearest() -> None:
    with pytest.raises(CatalogError, match=r"unknown model 'qwen3-06b'; known are .*Did you mean Qwen3-0.6B\?"):
        model("qwen3-06b")
    with pytest.raises(CatalogError) as refused:
        model("llama")
    assert all(known in str(refused.value) for known in known_models())


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(LayoutError, match="unknown dtype 'bf16'"):
        layout(model("tiny"), Parallelism(), "bf16")


def test_neither_the_catalog_nor_the_layouts_import_torch() -> None:
    code = "import sys, elastic_reshard.layout.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
