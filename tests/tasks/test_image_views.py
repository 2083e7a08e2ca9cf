"""Views of images: adjacent rows of one record, moved and mirrored, from a stream that can be repeated."""

import torch
from torch import Tensor

from lsg.tasks.data import Images
from lsg.tasks.encoded import EncodedImages, encode_images
from lsg.tasks.image_features import encode_features
from lsg.tasks.image_views import ImageViews

CPU = torch.device("cpu")


def encoded(size: int = 16, records: int = 6) -> EncodedImages:
    pixels = torch.arange(records * size * size).remainder(251).view(records, 1, size, size).to(torch.uint8)
    return encode_images(Images(pixels, torch.arange(records)), (0.0,), (1 / 255,), CPU)


def moves(image: Tensor, *, flips: bool) -> list[Tensor]:
    """Every view that an image of 16 x 16 may have, by torch's own padding."""
    wide = torch.nn.functional.pad(image[None], (2, 2, 2, 2), mode="reflect")[0]
    size = image.shape[-1]
    found = [wide[:, y : y + size, x : x + size] for y in range(5) for x in range(5)]
    return found + ([view.flip(2) for view in found] if flips else [])


def test_each_view_is_a_crop_of_its_own_padded_record() -> None:
    torch.manual_seed(0)
    data = encoded()
    for flip in (False, True):
        images, labels = ImageViews(data, 8, flip=flip).__getitems__([4, 1, 1])
        assert labels.tolist() == [4] * 8 + [1] * 16
        whole, _ = data.__getitems__([4, 1, 1])
        for row, view in enumerate(images):
            assert any(torch.equal(view, one) for one in moves(whole[row // 8], flips=flip))


def test_views_differ_and_reach_every_move_and_flip() -> None:
    torch.manual_seed(0)
    data = encoded(records=1)
    images, _ = ImageViews(data, 2000, flip=True).__getitems__([0])
    # Each of 50 views is missed with probability 3e-18.
    assert len({tuple(view.flatten().tolist()) for view in images}) == 50


def test_small_images_move_less() -> None:
    torch.manual_seed(0)
    data = encoded(size=8, records=1)
    images, _ = ImageViews(data, 500, flip=False).__getitems__([0])
    assert len({tuple(view.flatten().tolist()) for view in images}) == 9
    assert torch.equal(
        ImageViews(encoded(size=4), 3, flip=False).__getitems__([2])[0], encoded(size=4).__getitems__([2, 2, 2])[0]
    )


def test_the_global_stream_repeats_views() -> None:
    data = ImageViews(encoded(), 4, flip=True)
    state = torch.get_rng_state()
    first = data.__getitems__([0, 3])[0]
    second = data.__getitems__([0, 3])[0]
    torch.set_rng_state(state)
    assert torch.equal(data.__getitems__([0, 3])[0], first) and not torch.equal(first, second)
    assert len(data) == 6


def test_features_of_views_stay_with_their_record() -> None:
    data = ImageViews(encoded(), 3, flip=False)
    torch.manual_seed(5)
    features = encode_features(torch.nn.Identity(), data, torch.float32)
    torch.manual_seed(5)
    rows, labels = data.__getitems__(range(6))
    found, found_labels = features.__getitems__([4, 0])
    assert torch.equal(found, torch.cat([rows[12:15], rows[:3]]))
    assert torch.equal(found_labels, torch.cat([labels[12:15], labels[:3]]))
    assert len(features) == 6
