"""A contact sheet as one picture."""

from __future__ import annotations

import io
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from wds_datapipes.cli._app import without_controls
from wds_datapipes.cli._meter import human_bytes
from wds_datapipes.cli.show_sheet import Card, Sheet

__all__ = ["sheet_as_png"]

PAGE, CARD, INK, FAINT, LINE, BAR = "#f6f7f9", "#ffffff", "#1f2933", "#667380", "#dde2e8", "#1f6fb2"
CHIP, CHIP_INK, BAD, WELL = "#e3eefa", "#17507f", "#b3261e", "#eef1f4"

#: How many cards stand side by side, and the measures of the sheet in pixels.
COLUMNS = 6
MARGIN, GAP, VIEW, ABOUT, CHARTS = 40, 14, 188, 74, 190
WIDTH = 2 * MARGIN + COLUMNS * VIEW + (COLUMNS - 1) * GAP
#: Pictures that are smaller are shown larger, with their pixels as squares.
SMALL = 64
#: The most cards of a sheet: more would be no picture that can be looked at.
MOST_CARDS = 600


def sheet_as_png(sheet: Sheet) -> bytes:
    """Draw the sheet, and return the file."""
    cards = sheet.cards[:MOST_CARDS]
    rows = -(-len(cards) // COLUMNS)
    top = MARGIN + 116
    charts = CHARTS + 20 if sheet.bars else 0
    height = top + charts + max(rows * (VIEW + ABOUT + GAP), 40) + MARGIN - GAP
    image = Image.new("RGB", (WIDTH, height), PAGE)
    pen = _Pen(image)
    pen.text((MARGIN, MARGIN - 8), sheet.title, 24, INK, WIDTH - 2 * MARGIN)
    left = MARGIN
    for name, value in sheet.facts:
        pen.text((left, MARGIN + 38), name, 13, FAINT)
        left += max(pen.text((left, MARGIN + 56), value, 20, INK), pen.width(name, 13)) + 32
    if sheet.bars:
        half = (WIDTH - 2 * MARGIN - GAP) // 2 if sheet.classes else WIDTH - 2 * MARGIN
        _histogram(pen, sheet, (MARGIN, top, MARGIN + half, top + CHARTS))
        if sheet.classes:
            _classes(pen, sheet, (MARGIN + half + GAP, top, WIDTH - MARGIN, top + CHARTS))
    for number, card in enumerate(cards):
        row, column = divmod(number, COLUMNS)
        _card(pen, card, MARGIN + column * (VIEW + GAP), top + charts + row * (VIEW + ABOUT + GAP))
    if not cards:
        pen.text((MARGIN, top + charts), "There are no samples.", 14, FAINT)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class _Pen:
    """Draws on an image."""

    def __init__(self, image: Image.Image) -> None:
        self.image = image
        self.draw = ImageDraw.Draw(image)

    def width(self, text: str, size: int) -> int:
        """How wide a text is, in pixels."""
        return round(self.draw.textlength(text, _font(size)))

    def fitting(self, text: str, size: int, width: int) -> str:
        """Return as much of a text as there is room for."""
        if self.width(text, size) <= width:
            return text
        low, high = 0, min(len(text), width)  # no character is narrower than a pixel
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(f"{text[:middle]}...", size) <= width else (low, middle - 1)
        return f"{text[:low]}..."

    def text(
        self, at: tuple[int, int], text: str, size: int, colour: str, width: int = WIDTH, *, anchor: str = "la"
    ) -> int:
        """Write a line, and return how wide it is; what is no character is shown as its number."""
        line = self.fitting(without_controls(" ".join(text.split())), size, width)
        self.draw.text(at, line, fill=colour, font=_font(size), anchor=anchor)
        return self.width(line, size)

    def lines(self, at: tuple[int, int], text: str, size: int, colour: str, room: tuple[int, int]) -> None:
        """Write as many lines as there is room for, in (width, height)."""
        step = round(size * 1.4)
        written = 0
        for line in text.replace("\t", "    ").split("\n"):
            rest = without_controls(line)
            while written < room[1] // step:
                part = self.fitting(rest, size, room[0])
                if part != rest:
                    part = rest[: max(1, len(part) - 3)]
                    blank = part.rfind(" ")
                    part = part[:blank] if blank > len(part) // 2 else part
                self.draw.text((at[0], at[1] + written * step), part, fill=colour, font=_font(size))
                written += 1
                rest = rest[len(part) :].lstrip()
                if not rest:
                    break

    def box(self, box: tuple[int, int, int, int], fill: str, outline: str | None = None, radius: int = 8) -> None:
        """Draw a box with round corners."""
        self.draw.rounded_rectangle(box, radius, fill=fill, outline=outline)


def _card(pen: _Pen, card: Card, left: int, top: int) -> None:
    pen.box((left, top, left + VIEW - 1, top + VIEW + ABOUT - 1), CARD, LINE)
    view = (left + 1, top + 1, left + VIEW - 2, top + VIEW - 2)
    pen.draw.rounded_rectangle(view, 7, fill=WELL, corners=(True, True, False, False))
    picture = card.picture
    if picture is None:
        pen.lines((left + 10, top + 10), card.text, 13, BAD if card.failed else INK, (VIEW - 20, VIEW - 20))
    else:
        small = max(picture.size) <= SMALL
        room = VIEW - 34 if small else VIEW - 2
        scale = min(room / picture.width, room / picture.height, 1e9 if small else 1)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        method = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
        shown = picture.resize(size, method) if size != picture.size else picture
        at = left + (VIEW - size[0]) // 2, top + (VIEW - size[1]) // 2
        pen.image.paste(shown, at, shown if shown.mode == "RGBA" else None)
    below, inner = top + VIEW, VIEW - 20
    size_told = human_bytes(card.size)
    wide = pen.text((left + VIEW - 10, below + 8), size_told, 13, FAINT, anchor="ra")
    pen.text((left + 10, below + 7), card.key, 15, INK, inner - wide - 8)
    at_line = below + 30
    if card.label:
        told = pen.fitting(without_controls(card.label), 13, inner - 18)
        pen.box((left + 10, at_line, left + 28 + pen.width(told, 13), at_line + 19), CHIP, radius=9)
        pen.draw.text((left + 19, at_line + 2), told, fill=CHIP_INK, font=_font(13))
    about = card.text if picture is not None else ""
    names = ", ".join(f"{field.field} {human_bytes(field.size)}" for field in card.fields)
    pen.text((left + 10, below + (54 if card.label else 32)), about or names, 12, FAINT, inner)


def _histogram(pen: _Pen, sheet: Sheet, box: tuple[int, int, int, int]) -> None:
    pen.box(box, CARD, LINE)
    left, top, right, bottom = box[0] + 16, box[1] + 44, box[2] - 16, box[3] - 32
    title = f"Samples by size, {'logarithmic' if sheet.logarithmic else 'from the smallest to the largest'}"
    pen.text((left, box[1] + 13), title, 15, INK)
    most = max(bar.samples for bar in sheet.bars)
    step = (right - left) / len(sheet.bars)
    for at, bar in enumerate(sheet.bars):
        if bar.samples:
            height = max(2, round((bottom - top) * bar.samples / most))
            begin = round(left + at * step)
            end = max(begin + 1, round(left + (at + 1) * step) - 2)
            pen.draw.rectangle((begin, bottom - height, end, bottom), fill=BAR)
    pen.draw.line((left, bottom, right, bottom), fill=LINE)
    low, high = human_bytes(sheet.bars[0].low), human_bytes(sheet.bars[-1].high)
    pen.text((left, bottom + 8), low, 13, FAINT)
    if len(sheet.bars) > 2:
        middle = len(sheet.bars) // 2
        at_middle = round(left + middle * step), bottom + 8
        pen.text(at_middle, human_bytes(sheet.bars[middle].low), 13, FAINT, anchor="ma")
    if high != low:
        pen.text((right, bottom + 8), high, 13, FAINT, anchor="ra")


def _classes(pen: _Pen, sheet: Sheet, box: tuple[int, int, int, int]) -> None:
    pen.box(box, CARD, LINE)
    left, right = box[0] + 16, box[2] - 16
    pen.text((left, box[1] + 13), "Classes of these samples", 15, INK)
    room = (box[3] - box[1] - 52) // 20
    shown = sheet.classes if len(sheet.classes) + bool(sheet.others) <= room else sheet.classes[: room - 1]
    others = sheet.others + sum(count for _, count in sheet.classes[len(shown) :])
    name_width = min(180, max(pen.width(without_controls(name), 14) for name, _ in sheet.classes))
    for row, (name, count) in enumerate(shown):
        at = box[1] + 44 + 20 * row
        pen.text((left, at), name, 14, INK, name_width)
        begin, end = left + name_width + 12, right - 60
        pen.draw.rectangle((begin, at + 3, begin + max(2, round((end - begin) * count / shown[0][1])), at + 13), BAR)
        pen.text((right, at), f"{count:,}", 14, FAINT, anchor="ra")
    if others:
        at = box[1] + 44 + 20 * len(shown)
        pen.text((left, at), "others", 14, FAINT)
        pen.text((right, at), f"{others:,}", 14, FAINT, anchor="ra")
