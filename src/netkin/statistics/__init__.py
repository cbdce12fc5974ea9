"""Mergeable statistics that are updated batch by batch."""

from netkin.statistics.collector import (
    Collector,
    CostEstimate,
    LayerSize,
    Pair,
    RowCollector,
    Settings,
    Study,
    chunk_of,
    one_feed,
    row_examples,
    sum_of_chunks,
)
from netkin.statistics.cross_moments import CrossMoments
from netkin.statistics.frequencies import off_block_share
from netkin.statistics.grams import Grams, LayerGrams
from netkin.statistics.kernel_pairs import Kernels, LayerKernels
from netkin.statistics.layer_filters import Filters, LayerFilters
from netkin.statistics.layer_moments import LayerMoments
from netkin.statistics.layer_rows import LayerRows, LinearRows
from netkin.statistics.moments import Moments
from netkin.statistics.outer_products import LayerEmbeddings, MeanEmbedding
from netkin.statistics.outputs import Outputs
from netkin.statistics.rows import Rows
from netkin.statistics.sequence_rows import SequenceRows, Sequences
from netkin.statistics.sketches import LayerSketches, Sketch
from netkin.statistics.spectra import LayerSpectra, Spectra
from netkin.statistics.token_rows import TokenRows

# a pair type names the collectors that can give it
Moments.collectors = (LayerSpectra, LayerMoments, LinearRows, TokenRows)
Grams.collectors = (LayerGrams,)
Rows.collectors = (LayerRows,)
Kernels.collectors = (LayerKernels,)
Sequences.collectors = (SequenceRows,)
Sketch.collectors = (LayerSketches,)
Filters.collectors = (LayerFilters,)

__all__ = [
    "Collector",
    "CostEstimate",
    "CrossMoments",
    "Filters",
    "Grams",
    "Kernels",
    "LayerEmbeddings",
    "LayerFilters",
    "LayerGrams",
    "LayerKernels",
    "LayerMoments",
    "LayerRows",
    "LayerSize",
    "LayerSketches",
    "LayerSpectra",
    "LinearRows",
    "MeanEmbedding",
    "Moments",
    "Outputs",
    "Pair",
    "RowCollector",
    "Rows",
    "SequenceRows",
    "Sequences",
    "Settings",
    "Sketch",
    "Spectra",
    "Study",
    "TokenRows",
    "chunk_of",
    "off_block_share",
    "one_feed",
    "row_examples",
    "sum_of_chunks",
]
