#!/usr/bin/env bats
# What images take of the disks.

load helpers

setup_file() {
	node_up --handler-roots
	node_env
	for name in both base lean; do
		node push "df/$name:1" --dir "$NODE_DIR" --stack 3 --file "/bin/$name=/bin/busybox" >/dev/null
	done
	ocihold pull "$REGISTRY/df/both:1" 2>/dev/null
	ocihold pull --handler vm "$REGISTRY/df/both:1" 2>/dev/null
	ocihold pull --handler vm "$REGISTRY/df/lean:1" 2>/dev/null
	crictl -i "$CONTAINER_RUNTIME_ENDPOINT" pull "$REGISTRY/df/lean:1"
}

teardown_file() {
	node_down
}

setup() {
	node_env
	VM_ROOT=$NODE_DIR/lib/handlers/vm
}

# row HANDLER prints the line of the table for a handler's root.
row() {
	ocihold df | grep "^$1 "
}

@test "df prints one line for each root" {
	run -0 ocihold df
	[ "${#lines[@]}" = 4 ]
	[[ ${lines[0]} == HANDLER*"FILE SYSTEM"*RECLAIMABLE*"IN TWO ROOTS" ]]
	[[ ${lines[1]} == "default "*"$CRIO_ROOT "* ]]
	[[ ${lines[2]} == "vm "*"$VM_ROOT "* ]]
	[[ ${lines[3]} == "wasm "* ]]
	[[ $(row vm) =~ \ 0\ +1\ +2$ ]] # leased, leaning, in two roots
}

@test "df --tree names the images, the leaning one and the ones in two roots" {
	run -0 ocihold df --tree
	[ "$(grep -c 'df/both:1 .*, in two roots' <<<"$output")" = 2 ]
	[[ $output == *"df/lean:1 "*"leans on vm, in two roots"* ]]
	[[ $output == *"df/lean:1 of CRI-O's root leans on this root"* ]]
	run ! ocihold df --tree -o json
	[[ $output == *"leave it out"* ]]
	run ! ocihold check
	[[ $output == *"df/lean:1 in CRI-O's root leans on layers in the roots of vm"* ]]
	[[ $output == *"image $REGISTRY/df/both:1 is in the roots of default, vm: CRI-O runs it from its own"* ]]
}

@test "df says the same without the daemon" {
	# The free space of the machine changes, whoever asks.
	same() { ocihold df -o json | jq 'del(.roots[].file_system.available)'; }
	with=$(same)
	node kill ocihold --dir "$NODE_DIR"
	[ "$(same)" = "$with" ]
	node start ocihold --dir "$NODE_DIR"
	retry 10 ocihold status
}

@test "df has what du has" {
	used=$(ocihold df -o json | jq '.roots[] | select(.handler == "vm").bytes')
	found=$(du -s --total --block-size=1 "$VM_ROOT"/overlay{,-images,-layers} | awk 'END {print $1}')
	[ $((used > found ? used - found : found - used)) -lt $((found / 100)) ]
}

@test "what is reclaimable goes, and what is used or leaned on stays" {
	reclaimable() { ocihold df -o json | jq '.roots[] | select(.handler == "vm").reclaimable_bytes'; }
	bytes() { ocihold df -o json | jq '.roots[] | select(.handler == "vm").bytes'; }
	image=$(node push df/volume:1 --dir "$NODE_DIR" --file /big=/bin/busybox --file /second=/bin/bash)
	before=$(reclaimable)
	ocihold pull --handler vm "$image"
	[ "$(reclaimable)" -gt "$before" ]
	POD_HANDLER=vm pod_run p image-volume.ocihold.dev "[{\"image\": \"$image\", \"mountPath\": \"/v\"}]"
	container_run p c
	[ "$(reclaimable)" = "$before" ]
	[[ $(ocihold df --tree) == *"df/volume:1 "*", leased"* ]]
	pods_remove

	retry 30 ocihold rmi --handler vm "$image"
	before=$(bytes)
	gone=$(reclaimable)
	[ "$gone" -gt 0 ]
	ocihold rmi "$REGISTRY/df/both:1"
	ocihold rmi --handler vm "$REGISTRY/df/lean:1"
	[ "$(reclaimable)" = 0 ]
	freed=$((before - $(bytes)))
	# With records of the images, and what now keeps the layers that are leaned on.
	[ $((freed > gone ? freed - gone : gone - freed)) -lt 100000 ]
}
