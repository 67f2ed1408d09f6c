"""What the pictures of matplotlib have in common: the style of those that `flexring plan --svg` draws, and files that depend on their data only."""

# The colours of crates/flexring-simulator/src/drawing.
INK, GREY, GRID, FRAME = "#1F2933", "#52606D", "#E4E7EB", "#CBD2D9"
STYLE = {
    "svg.hashsalt": "flexring", "svg.fonttype": "none", "font.family": "sans-serif", "text.color": INK, "axes.labelcolor": GREY,
    "axes.titlecolor": INK, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.edgecolor": "#9AA5B1", "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": GREY, "ytick.color": GREY, "grid.color": GRID, "grid.alpha": 1.0,
}


class Pictures:
    """Pictures in `folder`, as SVG. `names` are those that were saved."""

    def __init__(self, folder):
        # ImportError without matplotlib.
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams.update(STYLE)
        import matplotlib.pyplot as plt

        self.plt = plt
        self.folder = folder
        self.names = []

    @staticmethod
    def style(axes, title):
        """A title, small ticks and a grid, for panels of a larger figure."""
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(visible=True)

    @staticmethod
    def points(figure):
        """Coordinates in points from the lower left corner of a figure."""
        from matplotlib.transforms import Affine2D

        return Affine2D().scale(1 / 72) + figure.dpi_scale_trans

    def save(self, figure, name, top=1):
        """Saves a figure, whose axes end at `top` (0 to 1)."""
        from matplotlib.patches import FancyBboxPatch

        # A frame with round corners, of 10 points.
        width, height = figure.get_size_inches() * 72
        figure.tight_layout(rect=(8 / width, 8 / height, 1 - 8 / width, top - 8 / height))
        place = {"xy": (0.5, 0.5), "width": width - 1, "height": height - 1, "transform": self.points(figure), "boxstyle": "round,pad=0,rounding_size=10"}
        figure.patch.set_alpha(0)
        figure.add_artist(FancyBboxPatch(**place, facecolor="white", edgecolor=FRAME, linewidth=0.8, zorder=-1))
        figure.savefig(self.folder / name, metadata={"Date": None})
        self.plt.close(figure)
        self.names.append(name)
