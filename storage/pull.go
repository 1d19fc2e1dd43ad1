package storage

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/sirupsen/logrus"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/shortnames"
	"go.podman.io/image/v5/signature"
	istorage "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
)

// PullOptions say how to pull.
type PullOptions struct {
	// Progress, if not nil, is called as the pull goes on: at least once where there is something to transfer, about
	// five times a second at most, one call at a time, and never after Pull has returned. It holds the transfer up
	// until it returns, and must not call methods of the Root.
	Progress func(Progress)
}

// Pull makes sure that the root has what ref names at its registry, for this node's platform, and returns it. Where
// several callers ask for the same, one transfer serves all; each may leave by its ctx, and with the last the transfer
// ends.
//
// A short name is looked for as registries.conf says, at each of its candidates until one has it. The image then has
// the name it was pulled by, normalized: repository:tag, or repository@digest where ref has a digest.
//
// Where the root has that manifest under that name already, the only request is the one for the manifest; a signature
// policy that asks for signatures adds the requests for them.
//
// Errors that wrap ErrNotFound, ErrInvalidReference, ErrUnauthorized, ErrRegistryUnavailable, ErrDigestMismatch,
// ErrSignature, ErrUnsupported, ErrDiskFull or ErrClosed say what has to change; ctx's error means that the caller left.
func (r *Root) Pull(ctx context.Context, ref string, opt PullOptions) (Image, error) {
	if err := r.usable(ctx); err != nil {
		return Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	candidates, err := r.pullCandidates(ref)
	if err != nil {
		return Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	keys := make([]string, len(candidates))
	for i, c := range candidates {
		keys[i] = c.String()
	}
	image, err := r.pulls.do(ctx, strings.Join(keys, " "), opt.Progress, func(ctx context.Context, report func(Progress)) (Image, error) {
		image, err := r.pullFirst(ctx, candidates, report)
		if err != nil && ctx.Err() != nil {
			r.log.WithField("image", ref).WithError(context.Cause(ctx)).Info("pull cancelled")
		}
		return image, err
	})
	if err != nil {
		return Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	return image, nil
}

// pullCandidates returns the full names that ref may stand for, with a tag or a digest each; at least one.
func (r *Root) pullCandidates(ref string) ([]reference.Named, error) {
	if _, err := parseName(ref); err != nil {
		return nil, err
	}
	// Like CRI-O, which has no one to ask: try every candidate.
	sys := r.sys
	mode := types.ShortNameModeDisabled
	sys.ShortNameMode = &mode
	resolved, err := shortnames.Resolve(&sys, ref)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidReference, err)
	}
	candidates := make([]reference.Named, 0, len(resolved.PullCandidates))
	for _, c := range resolved.PullCandidates {
		named, err := withoutTagBesideDigest(c.Value)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalidReference, err)
		}
		candidates = append(candidates, named)
	}
	return candidates, nil
}

// pullFirst pulls the first candidate that can be pulled.
func (r *Root) pullFirst(ctx context.Context, candidates []reference.Named, report func(Progress)) (Image, error) {
	var failed error
	for _, named := range candidates {
		image, err := r.pullOne(ctx, named, report)
		if err == nil {
			return image, nil
		}
		if ctx.Err() != nil {
			return Image{}, err
		}
		err = classify(reference.Domain(named), steady{err})
		switch {
		case len(candidates) == 1:
			return Image{}, err
		case failed == nil:
			failed = fmt.Errorf("%s: %w", named, err)
		default:
			failed = fmt.Errorf("%w; %s: %w", failed, named, err)
		}
	}
	return Image{}, failed
}

func (r *Root) pullOne(ctx context.Context, named reference.Named, report func(Progress)) (_ Image, err error) {
	sys := r.sys
	if r.insecure.match(reference.Domain(named), func(host string) ([]net.IP, error) {
		return net.DefaultResolver.LookupIP(ctx, "ip", host)
	}) {
		sys.DockerInsecureSkipTLSVerify = types.OptionalBoolTrue
	}
	trust, err := signature.DefaultPolicy(&sys)
	if err != nil {
		return Image{}, fmt.Errorf("read the signature policy: %w", err)
	}
	policy, err := signature.NewPolicyContext(trust)
	if err != nil {
		return Image{}, fmt.Errorf("read the signature policy: %w", err)
	}
	defer func() {
		if destroyErr := policy.Destroy(); err == nil && destroyErr != nil {
			err = destroyErr
		}
	}()

	have, has := r.named(named)
	src, err := openSource(ctx, named, &sys, func(top, instance digest.Digest) bool {
		return has && slices.Contains(have.Digests, top) && slices.Contains(have.Digests, instance)
	})
	if err != nil {
		return Image{}, err
	}
	if has && src.presentAs(have.Digests) {
		err := src.allowed(ctx, policy)
		if closeErr := src.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			return Image{}, err
		}
		return have, nil
	}
	return r.transfer(ctx, named, src, policy, &sys, report)
}

// named returns the sound image that has exactly this name.
func (r *Root) named(named reference.Named) (Image, bool) {
	record, err := r.store.Image(named.String())
	if err != nil || !slices.Contains(record.Names, named.String()) {
		return Image{}, false
	}
	image, err := r.image(record)
	return image, err == nil
}

// transfer copies the image from its open source, which it closes, into the root.
func (r *Root) transfer(ctx context.Context, named reference.Named, src *source, policy *signature.PolicyContext, sys *types.SystemContext, report func(Progress)) (Image, error) {
	destination, err := r.reference(named)
	if err != nil {
		return Image{}, err
	}
	events := make(chan types.ProgressProperties)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		newTracker(src.layers, report).run(events)
	}()
	var stored types.ImageReference
	_, err = copy.Image(ctx, policy, destination, openedReference{src.Reference(), src.ImageSource}, &copy.Options{
		SourceCtx:               sys,
		DestinationCtx:          sys,
		ProgressInterval:        progressInterval,
		Progress:                events,
		ReportResolvedReference: &stored,
	})
	close(events)
	<-drained
	if err != nil {
		return Image{}, err
	}
	_, record, err := istorage.ResolveReference(stored)
	if err != nil {
		return Image{}, fmt.Errorf("read the pulled image: %w", err)
	}
	image, err := r.image(record)
	if err != nil {
		return Image{}, fmt.Errorf("read the pulled image: %w", err)
	}
	r.log.WithFields(logrus.Fields{"image": named.String(), "id": image.ID, "digest": image.Digest.String()}).Info("image pulled")
	return image, nil
}
