"""Stands in for `vllm serve` in tests of the demonstration: the same addresses, canned answers, a child process.

    python fake_vllm.py --port PORT --kv-cache-dtype DTYPE --kv-cache-memory-bytes BYTES [...]

Answers differ between the two caches in one token. `--fail-requests` refuses every request, `--die` ends at once.
"""

import argparse
import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BYTES_PER_TOKEN = {"auto": 46080, "turboquant3.5": 5400}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        options = self.server.options
        tokens = options.kv_cache_memory_bytes // BYTES_PER_TOKEN[options.kv_cache_dtype]
        labels = f'kv_cache_memory_bytes="{options.kv_cache_memory_bytes}",kv_cache_size_tokens="{tokens}"'
        self.reply(f"# HELP\nvllm:cache_config_info{{{labels}}} 1.0\n" if self.path == "/metrics" else "")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0 and request["return_token_ids"] is True
        prompt = request["messages"][0]["content"]
        last = 8 if self.server.options.kv_cache_dtype == "auto" else 9
        code = re.search(r"access code of the archive room is (\d+)", prompt)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": f"It is {code[1]}." if code else "Yes."},
            "token_ids": [5, 6, 7, last],
        }
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 4, "total_tokens": 0}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "demo", "choices": [choice]}
        failing = self.server.options.fail_requests
        self.reply(json.dumps({**body, "usage": usage}), 500 if failing else 200)

    def reply(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=2**28)
    parser.add_argument("--fail-requests", action="store_true")
    parser.add_argument("--die", action="store_true")
    options, _ = parser.parse_known_args()
    if options.die:
        sys.exit("no such model")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.options = options
    server.serve_forever()


if __name__ == "__main__":
    main()
