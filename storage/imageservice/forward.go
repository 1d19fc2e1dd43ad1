package imageservice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Dial returns a connection to CRI-O's socket. It connects when it is first used, and again, within a second or so,
// after CRI-O has come back; calls meanwhile fail at once.
func Dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)))
	if err != nil {
		return nil, fmt.Errorf("dial CRI-O at %s: %w", socket, err)
	}
	return conn, nil
}

// frame is a message that is passed on as it came.
type frame struct{ content []byte }

// codec encodes messages as gRPC does by default, and leaves frames alone.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

// Name is none: with one, calls would have another content type than application/grpc, by which CRI-O tells gRPC from
// HTTP on its socket.
func (codec) Name() string { return "" }

func (c codec) Marshal(message any) (mem.BufferSlice, error) {
	if f, ok := message.(*frame); ok {
		return mem.BufferSlice{mem.SliceBuffer(f.content)}, nil
	}
	return c.CodecV2.Marshal(message)
}

func (c codec) Unmarshal(data mem.BufferSlice, message any) error {
	if f, ok := message.(*frame); ok {
		f.content = data.Materialize()
		return nil
	}
	return c.CodecV2.Unmarshal(data, message)
}

// anyStream is the shape of a call that may be any.
var anyStream = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

// forward passes a call of any service on to CRI-O.
func (s *Service) forward(_ any, client grpc.ServerStream) error {
	method, ok := grpc.MethodFromServerStream(client)
	if !ok {
		return status.Error(codes.Internal, "forward to CRI-O: the call has no method")
	}
	ctx, cancel := context.WithCancel(client.Context())
	defer cancel()
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md)
	}
	crio, err := s.crio.NewStream(ctx, anyStream, method, grpc.ForceCodecV2(newCodec()))
	if err != nil {
		return fromCRIO(s.crio, err)
	}
	// Requests flow on their own. They end when the client is done, at the latest as this call returns: then its stream
	// ends.
	go func() {
		if err := passRequests(client, crio); err != nil {
			cancel()
		}
	}()
	headers, err := passAnswers(crio, client)
	client.SetTrailer(crio.Trailer())
	if !headers {
		err = fromCRIO(s.crio, err)
	}
	return err
}

// passRequests passes on what the client sends, until it is done. Its error means that the call cannot go on.
func passRequests(client grpc.ServerStream, crio grpc.ClientStream) error {
	for {
		var f frame
		err := client.RecvMsg(&f)
		if errors.Is(err, io.EOF) {
			return crio.CloseSend()
		}
		if err != nil {
			return err
		}
		if err := crio.SendMsg(&f); err != nil {
			return nil //nolint:nilerr // what CRI-O has to say comes with its answers
		}
	}
}

// passAnswers passes on what CRI-O answers, until it is done, and tells whether CRI-O has begun to answer.
func passAnswers(crio grpc.ClientStream, client grpc.ServerStream) (headers bool, err error) {
	md, err := crio.Header()
	if err == nil && md != nil {
		headers = true
		if err := client.SendHeader(md); err != nil {
			return headers, err
		}
	}
	for {
		var f frame
		err := crio.RecvMsg(&f)
		if errors.Is(err, io.EOF) {
			return headers, nil
		}
		if err != nil {
			return headers, err
		}
		if err := client.SendMsg(&f); err != nil {
			return headers, err
		}
	}
}
