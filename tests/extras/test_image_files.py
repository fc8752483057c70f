"""Images are read from data URLs, files and the network, within limits."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import io
import os
import sys
import time

import pytest
from PIL import Image

import env
from kit.extras import images
from tests.helpers.http import served
from tests.helpers.models import COLORS, data_url, image_row, load_image_processor, png
from tests.helpers.recipes import ROOT, run


@pytest.fixture(scope="module")
def processor(vision_model):
    return load_image_processor(vision_model)


def test_an_unreadable_image_is_an_error_that_names_the_row(processor, workspace):
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            if "moved" in self.path:
                self.send_response(302)
                self.send_header("Location", f"{url}/ok?after_redirect")
                self.end_headers()
                return
            self.send_response(200 if "ok" in self.path else 404)
            self.end_headers()
            self.wfile.write(png(COLORS["b"]))

    where = f"{workspace / 'rows.jsonl'}:3"
    with served(Handler) as url:
        (workspace / "c.png").write_bytes(png(COLORS["r"]))
        os.mkfifo(workspace / "pipe.png")  # no process writes to it
        for source in (
            f"{url}/ok",
            str(workspace / "c.png"),
            (workspace / "c.png").as_uri(),
            "c.png",
        ):
            assert processor.load_image(source, where).size == (40, 30)
        redirects = "it redirects to http://127.0.0.1:.*, which is refused. Give the final address"
        too_large = "5000 x 4000 pixels, over 16777216. Make it smaller"
        unreadable = {  # {source: the reason in the message}
            f"{url}/gone": "404",
            f"{url}/moved": redirects,
            "http://elsewhere/x.png": "elsewhere is not in env.image_hosts",
            "none.png": "No such file",
            "data:image/png;base64,@@": "cannot be read",
            data_url(b"no image"): "cannot identify",
            data_url(png((0, 0, 0), (5000, 4000))): too_large,
            "pipe.png": "not a regular file",
            "/dev/zero": "not a regular file",
        }
        for source, reason in unreadable.items():
            with pytest.raises(env.DataError, match=rf"rows\.jsonl:3: image .*{reason}"):
                processor.load_image(source, where)
        assert "/moved" in requests and "/ok?after_redirect" not in requests
    # The server has ended, so this image comes from the cache.
    assert processor.load_image(f"{url}/ok", where).size == (40, 30)
    with pytest.raises(env.DataError, match="1 images, but 2 placeholders"):
        messages = env.render_row(image_row("c.png", "so <image>"), where)[0]
        env.encode_messages(messages, [], processor.tokenizer, where, processor)


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA"])
def test_five_formats_are_read_and_others_are_refused(processor, name):
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (250, 20, 20)).save(out, name)
    if name in images.FORMATS:
        red, green, blue = processor.load_image(data_url(out.getvalue()), "x:1").getpixel((9, 9))
        assert red > 230 and green < 40 and blue < 40
        return
    with pytest.raises(
        env.DataError, match=r"x:1: image .* cannot be read \(cannot identify image file"
    ):
        processor.load_image(data_url(out.getvalue()), "x:1")


def test_a_file_over_the_limit_is_refused(processor, tmp_path, monkeypatch):
    raw = png(COLORS["r"])
    (tmp_path / "a.png").write_bytes(raw)
    monkeypatch.setattr(images, "MAX_FILE_BYTES", len(raw))
    for source in ("a.png", data_url(raw)):
        assert processor.load_image(source, f"{tmp_path}/rows.jsonl:1").size == (40, 30)
    (tmp_path / "a.png").write_bytes(raw + b"0")
    for source in ("a.png", data_url(raw + b"0")):
        with pytest.raises(
            env.DataError, match=r"rows\.jsonl:1: image .*: its file is over 0 MiB. Make it smaller"
        ):
            processor.load_image(source, f"{tmp_path}/rows.jsonl:1")
    descriptors = []

    def fstat_of_device(descriptor):
        """Return the status of a device, as if it had replaced the file after the first check."""
        descriptors.append(descriptor)
        return os.stat("/dev/null")

    monkeypatch.setattr(images.os, "fstat", fstat_of_device)
    with pytest.raises(env.DataError, match="not a regular file"):
        processor.load_image("a.png", f"{tmp_path}/rows.jsonl:1")
    assert descriptors


def test_a_huge_file_is_read_up_to_the_limit(tmp_path, monkeypatch):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(10**12)  # a sparse file: it takes no space on the disk
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 1000)
    assert images.read_file(tmp_path / "a.png") == bytes(1001)


def test_an_endless_download_ends_at_the_limit(monkeypatch):
    sent = []

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(bytes(10**6))
                    sent.append(10**6)

    monkeypatch.setattr(images, "MAX_FILE_BYTES", 10**6)
    with served(Endless) as address, pytest.raises(images.TooLargeError):
        images.fetch(f"{address}/x", "x:1")
    assert sum(sent) < 10**8  # the limit, and what the buffers of the sockets hold


def test_the_images_of_a_row_share_a_limit_of_pixels(processor, monkeypatch):
    """Each of two images has 1,200 pixels. The sizes are read before an image is decoded."""
    messages, _ = env.render_row(image_row(data_url(png(COLORS["r"]))), "x:1")
    messages[0]["content"] += [{"type": "image", "image": data_url(png(COLORS["b"]))}]
    monkeypatch.setattr(images, "MAX_ROW_PIXELS", 2400)
    assert len(processor.load_images(messages, "x:1")) == 2
    monkeypatch.setattr(images, "MAX_ROW_PIXELS", 2399)
    together = "40 x 30 pixels: the images of the row have over 2399 pixels together"
    with pytest.raises(env.DataError, match=rf"x:1: image .*: {together}\. Make it smaller"):
        processor.load_images(messages, "x:1")


MEASURE_PEAK_MEMORY = """
import resource, sys
from env import DataError
from kit.extras import images
from PIL import Image, PngImagePlugin
big = open(sys.argv[1]).read()
vision = images.ImageProcessor(None, None, 0, [0], "", False)
messages = [{"role": "user", "content": [{"type": "image", "image": big}] * 16}]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    vision.load_images(messages, "x:1")
except DataError as error:
    print(str(error)[-90:])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_row_of_many_large_images_takes_little_memory(tmp_path):
    """The row has 16 images of 16 megapixels: 50 KB of text each, and 64 MiB if decoded."""
    (tmp_path / "big").write_text(data_url(png((0, 0, 0), (4096, 4096))))
    done = run(
        [sys.executable, "-c", MEASURE_PEAK_MEMORY, str(tmp_path / "big")], ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    message, peak = done.stdout.splitlines()
    assert "have over 33554432 pixels together. Make it smaller" in message
    assert int(peak) < 300  # MiB


def test_only_small_images_are_cached():
    images.decode_small.cache_clear()
    small = png(COLORS["r"], (1024, 1024))
    large = png(COLORS["r"], (1025, 1024))
    assert images.decode(small) is images.decode(small)
    assert images.decode(large) is not images.decode(large)
    assert images.decode_small.cache_info().currsize == 1


def test_a_slow_download_ends_at_the_timeout(monkeypatch):
    """The server sends one byte at a time, each within the socket's timeout."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)

    monkeypatch.setattr(images, "FETCH_TIMEOUT_S", 0.5)
    begin = time.monotonic()
    with (
        served(Slow) as address,
        pytest.raises(TimeoutError, match=r"not complete after 0\.5 s"),
    ):
        images.fetch(f"{address}/x", "x:1")
    assert time.monotonic() - begin < 5


def test_a_download_is_not_decompressed():
    """The body is 100 KB of gzip, which would become 100 MB of zeros."""

    class Packed(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(packed)

    packed = gzip.compress(bytes(10**8))
    with served(Packed) as address:
        assert images.fetch(f"{address}/x", "x:1") == packed
