"""Step `machine`: what this machine is, and whether the driver answers at all."""

import json
import os
import platform
import shutil

from .session import Cell, Failed

SECONDS = 60
QUESTION = "Which GPU, driver and limits does this machine have?"

SMI = "name,driver_version,pci.bus_id,pcie.link.gen.current,pcie.link.width.current,clocks.sm,power.limit,compute_mode,mig.mode.current"


def cells(_session):
    return [
        Cell("driver", 30, lambda session: session.cell("device.py")),
        Cell("flexring", 20, flexring),
        Cell("system", 20, system),
    ]


def flexring(session):
    return json.loads(session.run([session.place.programs["flexring"], "doctor", "--json"]))


def system(session):
    result = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
    tools = ("nvidia-smi", "nvcc", "nvidia-cuda-mps-control", "compute-sanitizer", "nsys")
    result["tools"] = {tool: shutil.which(tool) for tool in tools}
    if result["tools"]["nvidia-smi"]:
        values = smi(session, f"--query-gpu={SMI}", "--format=csv,noheader").splitlines()
        result["nvidia_smi"] = dict(zip(SMI.split(","), (value.strip() for value in values[0].split(",")))) if values else {}
        result["topology"] = smi(session, "topo", "-m")
    return result


def smi(session, *arguments):
    """What nvidia-smi prints, if only an error."""
    try:
        return session.run(["nvidia-smi", *arguments]).strip()
    except Failed as failure:
        return str(failure)


def words(rows):
    for name, result in rows:
        if name == "driver":
            yield f"{result['name']}, compute capability {result['capability']}, {result['multiprocessors']} multiprocessors"
            yield f"CUDA {result['cuda']} of the driver {result['driver']}"
        elif name == "system":
            yield f"{result['system']}, {result['cores']} cores, Python {result['python']}"
            yield "tools: " + ", ".join(f"{tool} {path or 'missing'}" for tool, path in result["tools"].items())
