// Package scratch makes bounded room on a disk for what a container writes into
// a volume.
//
// A Space is an ext4 file system of its own, in a sparse file that has no name,
// on a loop device. Each of the three goes with the one on it: with the last
// mount of the file system the kernel lets go of the device, the file and its
// blocks. So there is nothing to clear up, whenever this process is killed or the
// node loses power, but for a mount point that the next Open clears.
//
// The file takes what is written, up to the size of the Space, and gives back
// what is deleted. Sizes are promises, not reservations: all Spaces together may
// promise more than the disk has. One that is full says ENOSPC to its writers; a
// disk that fills up beneath a Space is an error to those that sync.
//
// There is no journal, as no Space outlives the boot of the node.
package scratch
