"""The small fonts of figures: they measure as the whole ones do, and what they lack comes from
these.
"""

import runpy
from pathlib import Path

import pytest
from fontTools.ttLib import TTFont
from matplotlib import font_manager, get_data_path
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font

from tokenscale.report import style as typeface
from tokenscale.report.style import style

FONTS = [name for name in typeface.FILES if name.endswith(".ttf")]
PLACE = Path(typeface.__file__).parent
TEXTS = ("AVATAR, To. Wa; fi ffi", "75\u202f100 (75\u202f000–75\u202f100) × 2", "10⁻⁶ ≤ “µs” … → α")


@pytest.mark.parametrize("name", FONTS)
def test_a_font_is_what_the_module_cuts_and_a_text_is_as_wide_as_in_the_whole_one(name, tmp_path):
    small = FT2Font(str(PLACE / name))
    whole = FT2Font(str(Path(get_data_path()) / "fonts/ttf" / Path(name).name))
    for text in TEXTS:
        found = []
        for font in (small, whole):
            font.set_size(40, 72)
            font.set_text(text, 0.0)
            found.append(font.get_width_height())
        assert found[0] == found[1], text
    runpy.run_path(str(Path(__file__).parents[2] / "docs/fonts.py"))["make"](tmp_path)
    kept, made = (TTFont(folder / Path(name).name) for folder in (PLACE / "fonts", tmp_path))
    assert kept.getGlyphOrder() == made.getGlyphOrder()
    assert kept["hmtx"].metrics == made["hmtx"].metrics
    assert "Bitstream" in kept["name"].getDebugName(0)


def test_figures_are_drawn_with_them_and_what_they_lack_comes_from_the_whole_font(recwarn):
    with style():
        for options in ({}, {"weight": "bold"}, {"style": "italic"}):
            found = font_manager.findfont(font_manager.FontProperties(**options))
            assert Path(str(found)).parent == PLACE / "fonts"
        figure = Figure()
        figure.text(0, 0, "Ж")
        figure.draw_without_rendering()
    assert not [str(warning.message) for warning in recwarn]
