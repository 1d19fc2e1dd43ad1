package storage

import (
	"context"
	"sync/atomic"
)

// Counts are what has happened in a root since this process opened it.
type Counts struct {
	// Pulls are those that began, FailedPulls those of them that ended with an error. Callers that shared one are one.
	Pulls, FailedPulls uint64
	// RefusedRemovals are removals of an image that was in use. One that was for several roots counts in each that has
	// the image.
	RefusedRemovals uint64
	// Collections are those that were no dry run, CollectedImages and CollectedBytes what they removed.
	Collections, CollectedImages, CollectedBytes uint64
}

// counters are Counts that many count at the same time.
type counters struct {
	pulls, failedPulls, refusedRemovals, collections, collectedImages, collectedBytes atomic.Uint64
}

// Counts returns the counts of a handler's root; they are 0 as long as its disk was never there.
func (r *Roots) Counts(handler string) Counts {
	for _, root := range r.inMemory() {
		if root.name == handler {
			c := &root.counts
			return Counts{
				Pulls: c.pulls.Load(), FailedPulls: c.failedPulls.Load(), RefusedRemovals: c.refusedRemovals.Load(),
				Collections: c.collections.Load(), CollectedImages: c.collectedImages.Load(), CollectedBytes: c.collectedBytes.Load(),
			}
		}
	}
	return Counts{}
}

func (r *Root) countPull(err error) {
	r.counts.pulls.Add(1)
	if err != nil {
		r.counts.failedPulls.Add(1)
	}
}

// countRefused counts a removal that was refused.
func (r *Roots) countRefused(ctx context.Context, handler, ref string) {
	found, _ := r.Find(ctx, ref) // what could be read counts
	for _, image := range found {
		for _, root := range r.inMemory() {
			if root.name == image.Handlers[0] && (handler == "" || handler == root.name) {
				root.counts.refusedRemovals.Add(1)
			}
		}
	}
}

func (r *Root) countCollection(c *Collection) {
	if c.DryRun {
		return
	}
	r.counts.collections.Add(1)
	r.counts.collectedBytes.Add(c.Freed)
	for _, image := range c.Images {
		if image.Goes {
			r.counts.collectedImages.Add(1)
		}
	}
}
