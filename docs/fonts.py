"""Cut the fonts of figures out of matplotlib's own: python docs/fonts.py."""

from pathlib import Path

from fontTools import subset
from matplotlib import get_data_path

from tokenscale.report import style

#: what the fonts keep: Latin-1, Greek, and the signs that numbers and sentences need
CHARACTERS = "20-7E,A0-FF,391-3C9,2010-2026,202F,2030,2032-2033,2039-203A,2070-2089,20AC,2190-2195,2202,2206,2211-2212,"
CHARACTERS += "2215,2219-221A,221E,2248,2260,2264-2265"


def make(folder: Path) -> None:
    """Cut the fonts out of matplotlib's own into a folder."""
    whole = Path(get_data_path()) / "fonts" / "ttf"
    for name in style.FILES:
        options = subset.Options(glyph_names=True, legacy_kern=True, notdef_outline=True)
        options.name_IDs = [0, 1, 2, 4, 6, 13, 14]  # names and licence
        options.layout_scripts = ["DFLT", "latn", "grek"]
        # rules of layout are cut anew for every drawing, which takes longer than the letters; pairs
        # are in `kern`, too
        options.drop_tables += ["FFTM", "GDEF", "GPOS", "MATH"]
        options.recalc_timestamp = False
        file = folder / Path(name).name
        if file.suffix != ".ttf":
            file.write_bytes((whole / "LICENSE_DEJAVU").read_bytes())
            continue
        font = subset.load_font(whole / file.name, options)
        cut = subset.Subsetter(options)
        cut.populate(unicodes=subset.parse_unicodes(CHARACTERS))
        cut.subset(font)
        for record in font["name"].names:
            if record.nameID == 1:
                record.string = style.FAMILY
            if record.nameID == 2 and str(record) == "Book":
                record.string = "Regular"  # else matplotlib looks for a heavier one
        font.save(file)


if __name__ == "__main__":
    make(Path(style.__file__).with_name("fonts"))
