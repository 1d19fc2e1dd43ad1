package imageservice

import (
	"context"
	"errors"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// RemoveImage removes an image that nobody uses. One that is not there is no error.
func (s *Service) RemoveImage(ctx context.Context, req *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	if err := s.remove(ctx, req.GetImage()); err != nil {
		return nil, asStatus(err)
	}
	return &cri.RemoveImageResponse{}, nil
}

func (s *Service) remove(ctx context.Context, spec *cri.ImageSpec) error {
	if spec.GetImage() == "" {
		return errNoImage
	}
	from := ""
	if narrow(spec) {
		chosen, err := s.chooser.Load().choose(spec)
		if err != nil {
			return err
		}
		from = chosen.root()
	}
	err := s.removeFrom(ctx, from, spec.GetImage())
	switch {
	case !errors.Is(err, storage.ErrNotFound):
		return err
	case narrow(spec):
		return nil
	}
	_, err = s.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: spec.GetImage()}})
	return fromCRIO(s.crio, err)
}

// Remove removes an image that nobody uses from the root of a handler, or, where handler is empty, from every root. It
// returns storage.ErrNotFound where there is none, and storage.ErrInUse.
func (s *Service) Remove(ctx context.Context, handler, ref string) error {
	from := ""
	if handler != "" {
		chosen, err := s.chooser.Load().known(handler)
		if err != nil {
			return err
		}
		from = chosen.root()
	}
	return s.removeFrom(ctx, from, ref)
}

func (s *Service) removeFrom(ctx context.Context, root, ref string) error {
	users, err := s.Users(ctx)
	if err != nil {
		return fmt.Errorf("remove %q: %w", ref, err)
	}
	return s.roots.RemoveFrom(ctx, root, ref, users)
}
