"""From files to rows: read samples, tokenise them with a loss mask, pack them, number them.

Data flows one way: sources -> render -> packing -> rows. Nothing is downloaded and everything is
deterministic: equal files, settings and seed give equal packets in every process. Not covered:
streaming (all tokens are held in memory, 5 bytes each) and rows shared between nodes.
"""

from dflash.data.errors import DataError
from dflash.data.packing import PackCounts, PackedRows, Row, pack_documents
from dflash.data.render import Document, Supervise, render_sample
from dflash.data.rows import (
    DataReport,
    RowSet,
    bad_line_report,
    build_rows,
    refuse_bad_line,
)
from dflash.data.sources import BadLine, Format, Sample, data_files, read_samples

__all__ = [
    "BadLine",
    "DataError",
    "DataReport",
    "Document",
    "Format",
    "PackCounts",
    "PackedRows",
    "Row",
    "RowSet",
    "Sample",
    "Supervise",
    "bad_line_report",
    "build_rows",
    "data_files",
    "pack_documents",
    "read_samples",
    "refuse_bad_line",
    "render_sample",
]
