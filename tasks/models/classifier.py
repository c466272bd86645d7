"""The classes alone: the paper's classification-only networks."""

from typing import ClassVar

from tasks.models.pictures import PictureClassifier


class Classifier(PictureClassifier):
    name: ClassVar[str] = "classifier"
