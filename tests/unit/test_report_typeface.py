"""The small fonts of figures: they measure as the whole ones do, and what they lack comes from
these.
"""

import runpy
from pathlib import Path

import pytest
from fontTools.ttLib import TTFont
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import font_manager, get_data_path
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font

from tokenscale.report import style as typeface
from tokenscale.report.style import style
from tokenscale.settings.run import APPROACHES

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


def test_each_approach_has_a_colour_of_its_own():
    looks = {name: typeface.look(name) for name in APPROACHES}
    assert set(typeface.APPROACHES) - {"memcpy"} == set(APPROACHES)
    assert len({look["color"] for look in looks.values()}) == len(APPROACHES)
    assert typeface.looks(list(APPROACHES)) == looks


@given(start=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6), ticks=st.integers(2, 12))
def test_no_two_ticks_of_an_axis_have_the_same_text(start, width, ticks):
    values = [start + width * number for number in range(ticks)]
    texts = typeface.PlainNumbers().format_ticks(values)
    assert len(set(texts)) == ticks
