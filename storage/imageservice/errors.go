package imageservice

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/ocihold/ocihold/storage"
)

// asStatus makes a gRPC error of err. kubelet tells two kinds by the beginning of their text, with code Unknown; CRI-O's
// own errors stay as they are.
func asStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	code := codes.Unknown
	switch {
	case errors.Is(err, storage.ErrRegistryUnavailable):
		err = fmt.Errorf("%w: %w", crierrors.ErrRegistryUnavailable, err)
	case errors.Is(err, storage.ErrSignature):
		err = fmt.Errorf("%w: %w", crierrors.ErrSignatureValidationFailed, err)
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, errHandler), errors.Is(err, storage.ErrInvalidReference), errors.Is(err, storage.ErrAmbiguous):
		code = codes.InvalidArgument
	case errors.Is(err, storage.ErrNotFound):
		code = codes.NotFound
	case errors.Is(err, storage.ErrUnauthorized):
		code = codes.PermissionDenied
	case errors.Is(err, storage.ErrInUse), errors.Is(err, storage.ErrUnmounted), errors.Is(err, errUsers):
		code = codes.FailedPrecondition
	case errors.Is(err, storage.ErrDiskFull), errors.Is(err, storage.ErrTooLarge):
		code = codes.ResourceExhausted
	case errors.Is(err, storage.ErrClosed), errors.Is(err, storage.ErrHung):
		code = codes.Unavailable
	}
	return status.Error(code, err.Error())
}

// isDown tells whether an answer says that CRI-O cannot be reached.
func isDown(err error) bool { return status.Code(err) == codes.Unavailable }

// fromCRIO says in an error of a call that never reached CRI-O which socket that was. Others stay as they are.
func fromCRIO(conn *grpc.ClientConn, err error) error {
	if !isDown(err) {
		return err
	}
	return status.Errorf(codes.Unavailable, "CRI-O does not answer at %s: %s", conn.Target(), status.Convert(err).Message())
}
