// Package hostmount keeps the shared host mounts behind image volumes and
// tells who uses them.
//
// A key names a volume's content; each key has at most one mount, attached at
// DIR/KEY, and every container that wants the content binds that one mount. It is
// a read-only overlay: of image layers, or of parts of such overlays. The
// overlay's source, as mountinfo shows it, is DIR/KEY. It travels with each bind
// into each mount namespace, so the kernel itself says which keys are in use,
// whatever this process or the container runtime remembers. A single part, a
// directory or a file, is attached as it is: there the kernel shows the key of the
// mount that it is of.
//
// DIR is an unbindable tmpfs: a recursive bind of the host's /run or / skips
// it, while a bind of DIR/KEY itself works. A mount namespace that is a copy of
// the host's has a copy of DIR, and loses the mark on some kernels (Linux 6.18),
// so that a pod may get such a copy with the host's /run. What still hangs below
// the tmpfs is therefore never taken for use, wherever it is seen: such a pod
// keeps nothing busy.
//
// The container runtime may have a mount namespace of its own: a Follower has the
// directory there, where the runtime looks for what it binds.
//
// The kernel holds all state. Nothing is written to disk, and a restarted
// daemon finds what its predecessor mounted. A Dir does no locking of its own:
// Ensure and Release of one key are for the caller to keep apart.
package hostmount
