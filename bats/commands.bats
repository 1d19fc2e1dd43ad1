#!/usr/bin/env bats
# ocihold's commands.

load helpers

setup_file() {
	node_up
	node_env
	IMAGE=$(node push some/stack:1 --dir "$NODE_DIR" --stack 5)
	export IMAGE
}

teardown_file() {
	node_down
}

setup() {
	node_env
}

@test "pull prints plain lines where there is no terminal, and the image ID" {
	run -0 --separate-stderr ocihold pull "$IMAGE"
	[[ $output =~ ^[0-9a-f]{64}$ ]]
	[[ $stderr == *"$IMAGE: 100% of "* ]]
	run -0 crictl inspecti -o go-template --template '{{.status.id}}' "$IMAGE"
	[ "$output" = "$(ocihold pull -o json "$IMAGE" 2>/dev/null | jq -r .id)" ]
}

@test "pull draws a bar on a terminal" {
	crictl rmi "$IMAGE" || true
	run -0 script -qec "stty cols 120 rows 30; ocihold --config $OCIHOLD_CONFIG pull $IMAGE" /dev/null
	[[ $output == *"$IMAGE "*"[====="*"]"* ]]
}

@test "pull says what failed" {
	run ! ocihold pull "$REGISTRY/no/such:1"
	[[ $output == *"no/such:1"*"not found"* ]]
	run ! ocihold pull "UPPER case"
}

@test "images lists what CRI-O lists, with the daemon and without" {
	ocihold pull "$IMAGE" 2>/dev/null
	theirs=$(crictl images -o json | jq -r '.images[].id' | sort)
	[ "$(ocihold images -o json | jq -r '.images[].id' | sort)" = "$theirs" ]
	node kill ocihold --dir "$NODE_DIR"
	[ "$(ocihold images -o json | jq -r '.images[].id' | sort)" = "$theirs" ]
	run -0 ocihold pull "$IMAGE"
	run ! ocihold volumes
	[[ $output == *"is 'ocihold run' started?"* ]]
	node start ocihold --dir "$NODE_DIR"
}

@test "config crio and config hook are what is in force" {
	ocihold config crio >"$BATS_TEST_TMPDIR/crio.conf"
	[[ $(cat "$BATS_TEST_TMPDIR/crio.conf") == *"internal_repair = false"* ]]
	run -0 grep -rlF "internal_repair = false" "$NODE_DIR/etc"
	ocihold config hook >"$BATS_TEST_TMPDIR/hook.json"
	jq -e '.stages == ["createRuntime"]' "$BATS_TEST_TMPDIR/hook.json"
	run -0 cmp "$BATS_TEST_TMPDIR/hook.json" "$NODE_DIR/hooks/ocihold.json"
}

@test "a second daemon is refused" {
	run ! ocihold run
	[[ $output == *"another ocihold runs in "* ]]
	run -0 ocihold status
}

@test "an unknown setting is refused with file, line and the nearest known" {
	printf 'log_level = "info"\n[volumes]\nmount_ap = "auto"\n' >"$BATS_TEST_TMPDIR/o.toml"
	run ! command ocihold --config "$BATS_TEST_TMPDIR/o.toml" config hook
	[[ $output == *'o.toml:3: unknown key "volumes.mount_ap"; did you mean "volumes.mount_api"?'* ]]
}

@test "config show prints what config validate takes" {
	ocihold config show >"$BATS_TEST_TMPDIR/o.toml"
	grep -q '^log_level = "info"$' "$BATS_TEST_TMPDIR/o.toml"
	run -0 ocihold config validate "$BATS_TEST_TMPDIR/o.toml"
	[ "$output" = "$BATS_TEST_TMPDIR/o.toml is valid." ]
	command ocihold --config "$BATS_TEST_TMPDIR/o.toml" config show | cmp - "$BATS_TEST_TMPDIR/o.toml"
	printf '[[routes]]\nimage = "a/**"\nhandler = "none"\n' >>"$BATS_TEST_TMPDIR/o.toml"
	run ! ocihold config validate "$BATS_TEST_TMPDIR/o.toml"
	[[ $output == *'routes[0].handler = "none": there is no such handler'* ]]
	run ! ocihold config validate "$BATS_TEST_TMPDIR/absent.toml"
}

@test "status tells how the daemon, its roots and its sweeps are" {
	run -0 ocihold status
	[[ $output == *"root of handler default "*" ok"* ]]
	[ "$(ocihold status -o json | jq -c '[.registered, .ready, .alive, .roots[0].handler]')" = '[true,true,true,"default"]' ]
}

@test "completion" {
	ocihold completion bash | bash -n
	run -0 ocihold __complete config ""
	[[ $output == *show*validate* ]]
}

@test "version" {
	run -0 ocihold version
	[[ $output == "ocihold "* ]]
}
