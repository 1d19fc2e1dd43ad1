#!/usr/bin/env bats
# Collecting images that nobody uses in a handler's root.

load helpers

setup_file() {
	printf '[handlers.vm]\nmax_bytes = "64MiB"\ngc_high = 10\ngc_low = 5\ngc_min_age = "0s"\ngc_interval = "24h"\npinned_images = ["*/pinned*"]\n' \
		>"$BATS_FILE_TMPDIR/gc.toml"
	node_up --handler-roots --ocihold-config "$BATS_FILE_TMPDIR/gc.toml"
	node_env
	head -c 8M /dev/urandom >"$BATS_FILE_TMPDIR/big"
	head -c 8M /dev/urandom >"$BATS_FILE_TMPDIR/other"
	PINNED=$(node push gc/pinned:1 --dir "$NODE_DIR" --file "/f=$BATS_FILE_TMPDIR/big")
	UNUSED=$(node push gc/unused:1 --dir "$NODE_DIR" --file "/f=$BATS_FILE_TMPDIR/other")
	export PINNED UNUSED
}

teardown_file() {
	node_down
}

setup() {
	node_env
	IDS=$BATS_TEST_TMPDIR/ids
}

# vm_ids lists the images in the root of vm.
vm_ids() {
	ocihold images -o json | jq -r '.images[] | select(.handlers | index("vm")) | .id' | sort
}

@test "gc says of each image why it goes or stays, and removes what may go" {
	ocihold pull --handler vm "$PINNED" 2>/dev/null >"$IDS"
	node kill ocihold --dir "$NODE_DIR" # which would collect after the pull
	unused=$(ocihold pull --handler vm "$UNUSED" 2>/dev/null)

	run -0 ocihold gc --handler vm --dry-run
	[[ ${lines[0]} == "vm: $NODE_DIR/lib/handlers/vm, "*" of 67.11MB ("*"%) taken" ]]
	[[ ${lines[1]} =~ ^IMAGE\ +IMAGE\ ID\ +SIZE\ +UNUSED\ FOR\ +ACTION\ +WHY$ ]]
	[[ $output =~ $UNUSED\ +${unused:0:12}\ +8.[0-9]+MB\ .*\ +would\ go\ +least\ recently\ used,\ and\ the\ root\ is\ above\ gc_high,\ 10% ]]
	[[ $output =~ $PINNED\ +$(head -c 12 "$IDS")\ .*\ +stays\ +pinned ]]
	[[ ${lines[-1]} == "would free 8."*"MB: 1 images, 0 layers without an image, 0B of downloads" ]]
	[ "$(vm_ids | wc -l)" = 2 ]

	run -0 ocihold gc
	[[ $output == *"$UNUSED "*" removed "* ]]
	[ "$(vm_ids)" = "$(cat "$IDS")" ]
	node start ocihold --dir "$NODE_DIR"
	retry 10 ocihold status
}

@test "the daemon collects after a pull, and gc asks it" {
	ocihold pull --handler vm "$PINNED" 2>/dev/null >"$IDS"
	ocihold pull --handler vm "$UNUSED" 2>/dev/null
	gone() { [ "$(vm_ids)" = "$(cat "$IDS")" ]; }
	retry 20 gone
	grep -F 'msg="images collected"' "$NODE_DIR/log/ocihold.log" | grep -F 'images_removed=1'
	run -0 --separate-stderr ocihold gc -o json
	[ "$(jq -r '.collections[] | select(.handler == "vm") | .images[0].why' <<<"$output")" = pinned ]
	[ "$(jq -r '.collections | length' <<<"$output")" = 2 ]
}

@test "gc refuses the default handler and one without a root" {
	run ! ocihold gc --handler default
	[[ $output == *"in which kubelet collects"* ]]
	run ! ocihold gc --handler runc
	[[ $output == *'handler "runc" has no root of its own: there are vm, wasm'* ]]
}

@test "gc names a bad record, and collects the rest" {
	node kill ocihold --dir "$NODE_DIR"
	ocihold pull --handler vm "$PINNED" 2>/dev/null >"$IDS"
	ocihold pull --handler vm "$UNUSED" 2>/dev/null
	sed -i "s#\"names\":\[\"[^\"]*/pinned:1\"\]#\"names\":[\"no-tag\"]#" "$NODE_DIR/lib/handlers/vm/overlay-images/images.json"
	run ! --separate-stderr ocihold gc --handler vm
	[[ $output == *"$UNUSED "*" removed "* ]]
	[[ $stderr == *"$(cat "$IDS")"*"no-tag"*"not all could be collected"* ]]
	sed -i "s#no-tag#localhost/no:tag#" "$NODE_DIR/lib/handlers/vm/overlay-images/images.json"
	node start ocihold --dir "$NODE_DIR"
	retry 10 ocihold status
}
