// Package control is how ocihold's commands ask its daemon: HTTP with JSON
// over a unix socket that only root may use.
//
// A pull or import answers with a stream of events, one JSON object a line: how far it
// is, and at last the image or an error. The client's going away cancels its
// part in it. The commands and the daemon are one binary; the protocol is
// theirs alone and may change between versions.
package control

import (
	"context"
	"errors"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
	"github.com/ocihold/ocihold/storage"
)

// ErrDown is returned, wrapped, when no daemon answers on the socket.
var ErrDown = errors.New("the daemon does not answer")

// Status is how the daemon is.
type Status struct {
	health.Report

	Version string `json:"version"`
}

// Images are the roots' images, and what is wrong with those left out.
type Images struct {
	Images []storage.ImageAt `json:"images"`
	Faults []string          `json:"faults,omitempty"`
}

// DiskUse is what roots have on their disks, and what could not be read of them.
type DiskUse struct {
	Roots   []storage.RootUsage `json:"roots"`
	Scratch Scratch             `json:"scratch"`
	Faults  []string            `json:"faults,omitempty"`
}

// Scratch is what writable volumes take of the disk of a directory.
type Scratch struct {
	hostmount.Scratch

	Directory string `json:"directory"`
}

// Collections are what was collected in handlers' roots, and what is wrong with
// those left out.
type Collections struct {
	Collections []storage.Collection `json:"collections"`
	Faults      []string             `json:"faults,omitempty"`
}

// Daemon is what the commands may ask for. The daemon implements it, and
// Client passes it on.
type Daemon interface {
	Status(ctx context.Context) (Status, error)
	Volumes(ctx context.Context) ([]imagevolume.Status, error)
	Images(ctx context.Context) (Images, error)
	DiskUse(ctx context.Context) (DiskUse, error)
	// Pull pulls into the handler's root; without a handler, into the one that a
	// route gives, or the default one.
	Pull(ctx context.Context, handler, ref string, progress func(storage.Progress)) (storage.Image, error)
	// Import imports from a file or directory of the daemon's host into the
	// handler's root; without a handler, into the default one. An empty name is
	// the one that the file has.
	Import(ctx context.Context, handler, from, name string, progress func(storage.Progress)) (storage.Image, error)
	// Remove removes from the handler's root; without a handler, from every one.
	Remove(ctx context.Context, handler, ref string) error
	// Collect collects in the handler's root; without a handler, in every one that
	// has a root of its own.
	Collect(ctx context.Context, handler string, dryRun bool) (Collections, error)
}

// pullEvent is a line of the answer to a pull or import.
type pullEvent struct {
	Progress *storage.Progress `json:"progress,omitempty"`
	Image    *storage.Image    `json:"image,omitempty"`
	Error    string            `json:"error,omitempty"`
}
