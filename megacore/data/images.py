"""Images of chats: read from their files, and made into what a model's tower takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data import pretrained
from megacore.data.formats import BadExample, ImageFile
from megacore.store.io.files import open_file


def open_image(image: ImageFile) -> Any:
    """Return an image as PIL has it, upright and in RGB, as transformers reads it. Raises BadExample: the file is not
    there, or is no image."""
    from PIL import Image, ImageOps

    try:
        with open_file(image.path) as file, Image.open(file) as found:
            return ImageOps.exif_transpose(found).convert("RGB")
    except Exception as error:  # of files of strangers
        raise BadExample(f"{image.where} cannot be read as an image: {error}") from error


class ImageProcessor:
    """The processor of a folder, as to its images."""

    def __init__(self, folder: Path) -> None:
        self._processor = pretrained.processor(folder)

    def inputs(self, file: str) -> list[tuple[str, tuple[int, ...], npt.NDArray[Any]]]:
        """Return (name, shape, numbers) of each input that a tower takes of an image."""
        image, processor = open_image(ImageFile(Path(file), file)), self._processor
        made = processor(text=processor.image_token, images=[[image]], return_tensors="np")
        of_tokens = {*processor.tokenizer.model_input_names, "token_type_ids", "mm_token_type_ids", "labels"}
        arrays = {name: np.asarray(made[name]) for name in made if name not in of_tokens}
        kinds = {name: np.float32 if each.dtype.kind == "f" else np.int64 for name, each in arrays.items()}
        return [(name, each.shape, each.astype(kinds[name]).ravel()) for name, each in arrays.items()]
