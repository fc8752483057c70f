"""Images are read from data URLs, files and the network. Downloads have limits."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import io
import time

import pytest
from PIL import Image

import env
from extras import images
from tests.helpers.http import served
from tests.helpers.models import COLORS, data_url, image_row, load_image_processor, png


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
        for source in (
            f"{url}/ok",
            str(workspace / "c.png"),
            (workspace / "c.png").as_uri(),
            "c.png",
        ):
            assert processor.load_image(source, where).size == (40, 30)
        redirects = "it redirects to http://127.0.0.1:.*, which is refused. Give the final address"
        unreadable = {  # {source: the reason in the message}
            f"{url}/gone": "404",
            f"{url}/moved": redirects,
            "http://elsewhere/x.png": "elsewhere is not in env.image_hosts",
            "none.png": "No such file",
            "data:image/png;base64,@@": "cannot be read",
            data_url(b"no image"): "cannot identify",
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


@pytest.mark.parametrize("name", ["PNG", "WEBP", "TIFF"])
def test_five_formats_are_read_and_others_are_refused(processor, name):
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (250, 20, 20)).save(out, name)
    if name in images.FORMATS:
        red, green, _ = processor.load_image(data_url(out.getvalue()), "x:1").getpixel((9, 9))
        assert red > 230 and green < 40
        return
    with pytest.raises(env.DataError, match="cannot identify image file"):
        processor.load_image(data_url(out.getvalue()), "x:1")


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

    monkeypatch.setattr(images, "MAX_FETCHED_BYTES", 10**6)
    too_large = "x:1: over 0 MiB. Make it smaller"
    with served(Endless) as address, pytest.raises(env.DataError, match=too_large):
        images.fetch(f"{address}/x", "x:1")
    assert sum(sent) < 10**8  # the limit, and what the buffers of the sockets hold


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
