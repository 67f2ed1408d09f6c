"""What the benchmarks' pictures have in common: matplotlib without a display, and files that depend on their data only."""


class Pictures:
    """Pictures in `folder`, as SVG. `names` are those that were saved."""

    def __init__(self, folder):
        # ImportError without matplotlib.
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "flexring"
        import matplotlib.pyplot as plt

        self.plt = plt
        self.folder = folder
        self.names = []

    @staticmethod
    def style(axes, title):
        """A title, small ticks and a grid, for panels of a larger figure."""
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)

    def save(self, figure, name, top=1):
        """Saves a figure, whose axes end at `top` (0 to 1)."""
        figure.tight_layout(rect=(0, 0, 1, top))
        figure.savefig(self.folder / name, metadata={"Date": None})
        self.plt.close(figure)
        self.names.append(name)
