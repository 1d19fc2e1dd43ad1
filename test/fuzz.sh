#!/bin/bash
# fuzz.sh TIME [go test flags]: runs every fuzz target of the module for TIME.
#
# Go's fuzzer sometimes ends with "context deadline exceeded" when its time is
# up while an input is being tried; that names no input and is no finding. Such
# a target is run again, at most twice. Making new inputs smaller would take
# most of so short a time, so it is left out.
set -euo pipefail
time=$1
shift
cd "$(dirname "$0")/.."

fuzz() {
	local out
	out=$(mktemp)
	for _ in 1 2 3; do
		if go test "$@" >"$out" 2>&1; then
			tail -n 1 "$out"
			rm "$out"
			return 0
		fi
		if ! grep -q 'context deadline exceeded' "$out" || grep -q 'Failing input' "$out"; then
			break
		fi
	done
	cat "$out"
	rm "$out"
	return 1
}

go list "$@" -f '{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}} {{.ImportPath}}{{end}}' ./... | while read -r dir pkg; do
	for target in $(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed 's/func //'); do
		echo "fuzz $pkg $target"
		fuzz "$@" -run '^$' -fuzz "^$target\$" -fuzztime "$time" -fuzzminimizetime 1x "$pkg"
	done
done
